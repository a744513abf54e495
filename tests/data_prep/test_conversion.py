"""Episode files to a store: every valid episode once, bad files refused and listed, resumable."""

import io
import re
import tracemalloc
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import TrajectoryStore, store_path, stored_collectors
from agentic_ring.data.trajectories import EPISODE_DTYPES, episode_widths
from agentic_ring.errors import ConfigError, DataError, StoreError
from agentic_ring.files.json_files import json_row
from data_prep import conversion, stores
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import (
    EpisodeFile,
    EpisodeLabel,
    as_exorl_loads,
    collector_folder,
    episode_file,
    read_episode,
    write_episode,
)
from tests.commands import exit_status
from tests.data_prep.exploration import cut, uniform_episodes

DOMAIN = DOMAINS["cartpole"]


@pytest.fixture(scope="module")
def explored():
    return uniform_episodes(DOMAIN, ["swingup"] * 4, action_repeat=8)


def buffer_of(root):
    return collector_folder(root, DOMAIN.name, "rnd") / "buffer"


def config(root, **changes):
    return ConvertConfig(domain="cartpole", collector="rnd", data=root, **changes)


def fill(root, explored, lengths):
    for number, length in enumerate(lengths):
        write_episode(buffer_of(root), number, cut(explored[number % 4], 8 * (number % 50), length))


def contents(path):
    with TrajectoryStore.open(path) as store:
        store.verify()
        return {stored.source: stored for stored in store.episodes()}


def names_of(lengths, numbers):
    return [f"rnd/episode_{number:06d}_{lengths[number]}.npz" for number in numbers]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-200])


def rewrite(path, name, change):
    with np.load(path) as file:
        arrays = {**file, name: change(file[name])}
    np.savez_compressed(path, **arrays)


BAD_FILES = (
    (truncate, "readable"),
    (lambda path: path.write_bytes(b"\x93NUMPY"), "not a zip file"),
    (lambda path: rewrite(path, "reward", lambda _: np.array([{}, None], dtype=object)), "pickles"),
    (lambda path: rewrite(path, "action", lambda action: action.astype(float)), "float64"),
    (lambda path: rewrite(path, "physics", lambda physics: physics + 0.5), "physics and observation"),
    (lambda path: path.rename(str(path).replace("_30.npz", "_31.npz")), "says 31"),
    (lambda path: path.rename(path.with_name("best.npz")), "name"),
)


def test_valid_episodes_arrive_unchanged_and_bad_files_are_listed(tmp_path, explored):
    lengths = [1000, 160, 1, *[30] * len(BAD_FILES), 31]
    summaries = []
    for processes in (1, 2):
        root = tmp_path / str(processes)
        fill(root, explored, lengths)
        for (damage, _), file in zip(BAD_FILES, sorted(buffer_of(root).glob("*_30.npz")), strict=True):
            damage(file)
        summary = convert(config(root, processes=processes, part_episodes=2))
        summaries.append(summary)
        assert summary.store == store_path(root, "cartpole", "rnd")
        assert [path.name for path in summary.store.parent.iterdir()] == ["cartpole-rnd.h5"]
        # Those with a bad name come first.
        skipped = *summary.skipped[1:], summary.skipped[0]
        for (_, expected), (_, why) in zip(BAD_FILES, skipped, strict=True):
            assert re.search(expected, why), why
    valid = [0, 1, 2, len(lengths) - 1]
    assert summary.episodes == summary.added == len(valid)
    assert summaries[0].store.read_bytes() == summary.store.read_bytes()
    for number, (name, got) in zip(valid, contents(summary.store).items(), strict=True):
        expected = cut(explored[number % 4], 8 * number, lengths[number])
        assert name == f"rnd/episode_{number:06d}_{lengths[number]}.npz"
        for field in ("observation", "action", "reward", "discount", "physics"):
            np.testing.assert_array_equal(getattr(got.episode, field), getattr(expected, field), strict=True)
        np.testing.assert_array_equal(got.rewards["swingup"], expected.reward[:, 0])
        assert (got.algorithm, got.action_repeat) == ("rnd", 1 if lengths[number] == 1 else 8)


def test_without_any_valid_file_nothing_is_written(tmp_path, explored):
    with pytest.raises(DataError, match=r"(?s)rnd.buffer.*/exorl/cartpole/rnd\.zip.*collect"):
        convert(config(tmp_path))
    fill(tmp_path, explored, [30])
    truncate(buffer_of(tmp_path) / "episode_000000_30.npz")
    with pytest.raises(DataError, match=r"none of the 1 files in .*not a readable"):
        convert(config(tmp_path))
    assert not store_path(tmp_path, "cartpole", "rnd").exists()


def test_labels_say_who_acted_and_which_episodes_are_finished(tmp_path, explored):
    """A file without a label is of an unfinished round; actions must agree with the label's action repeat."""
    folder = collector_folder(tmp_path, "cartpole", "mini_rnd")
    names = [write_episode(folder / "buffer", n, cut(explored[n], 0, 40)).name for n in range(3)]
    (folder / "collection.json").write_text("{}")
    labels = [EpisodeLabel(names[n], n, "rnd", "ours", "ou", 0, action_repeat=(4, 16)[n]) for n in range(2)]
    (folder / "episodes.jsonl").write_text("".join(json_row(asdict(label)) for label in labels))
    summary = convert(ConvertConfig(domain="cartpole", collector="mini_rnd", data=tmp_path))
    assert [(file.name, why[-2:]) for file, why in summary.skipped] == [(names[1], "16")]
    with TrajectoryStore.open(summary.store) as store:
        assert (store.sources, store.algorithms) == ([f"mini_rnd/{names[0]}"], ["ou"])
        assert store.action_repeats.tolist() == [4]


def test_stopped_conversion_goes_on_from_its_parts(tmp_path, explored, monkeypatch, capsys):
    lengths = [30] * 11
    fill(tmp_path, explored, lengths[:10])
    truncate(buffer_of(tmp_path) / "episode_000004_30.npz")
    store = store_path(tmp_path, "cartpole", "rnd")
    parts = store.with_name(f"{store.name}.parts")

    def stopping(path, *written):
        if path.name == "part-000002.h5":
            raise KeyboardInterrupt
        write_store(path, *written)

    write_store = conversion.write_store
    monkeypatch.setattr(conversion, "write_store", stopping)
    with pytest.raises(KeyboardInterrupt):
        convert(config(tmp_path, part_episodes=3))
    monkeypatch.undo()
    assert not store.exists()
    assert [len(contents(part)) for part in sorted(parts.glob("*"))] == [3, 3]
    assert len(convert(config(tmp_path, part_episodes=3)).skipped) == 1
    assert "converting cartpole-rnd 4/4" in capsys.readouterr().err
    first = names_of(lengths, [0, 1, 2, 3, 5, 6, 7, 8, 9])
    assert list(contents(store)) == first
    assert [path.name for path in store.parent.iterdir()] == [store.name]

    # Parts that a finished merge has left behind are not added again.
    parts.mkdir()
    (parts / "part-000000.h5").write_bytes(store.read_bytes())
    fill(tmp_path, explored, lengths)
    summary = convert(config(tmp_path))
    assert (summary.added, summary.skipped) == (2, ())
    assert list(contents(store)) == first + names_of(lengths, [4, 10])
    assert not parts.exists()

    damaged = bytearray(store.read_bytes())
    damaged[-3000] ^= 1
    store.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"cartpole-rnd.h5"):
        convert(config(tmp_path))
    assert store.read_bytes() == damaged


def test_exorl_compat_is_a_store_of_its_own_with_controls_forgotten(tmp_path, explored):
    lengths = [100, 100, *[10] * 10]
    fill(tmp_path, explored, lengths)
    compat = convert(config(tmp_path, exorl_compat=True))
    assert compat.store == store_path(tmp_path, "cartpole", "rnd-exorl_compat")
    stored = contents(convert(config(tmp_path, max_episodes=4)).store)
    assert list(stored) == names_of(lengths, [1, 4, 7, 10])
    forgotten = contents(compat.store)
    assert list(forgotten) == names_of(lengths, range(12))
    paid, unpaid = (episodes["rnd/episode_000001_100.npz"] for episodes in (stored, forgotten))
    assert unpaid.rewards["swingup"].sum() > paid.rewards["swingup"].sum()
    np.testing.assert_array_equal(unpaid.episode.reward, paid.episode.reward)
    with pytest.raises(ConfigError, match="max_episodes"):
        config(tmp_path, exorl_compat=True, max_episodes=3)
    # It takes the episodes that ExoRL's loader gets to before it has a million transitions.
    for length, last in ((1000, 1003), (250, 4003)):
        files = [EpisodeFile(Path(f"episode_{n:06d}_{length}.npz"), n, length) for n in range(10_000)]
        assert [file.index for file in as_exorl_loads(files)] == list(range(last + 1))


def archive(observation, method=zipfile.ZIP_STORED):
    """The file of an episode of two transitions with these contents of its observations."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, width in episode_widths(DOMAIN).items():
            content = io.BytesIO()
            np.save(content, np.ones((3, width), EPISODE_DTYPES[name]))
            content = observation if name == "observation" else content.getvalue()
            opened.writestr(f"{name}.npy", content, method)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_a_false_header_of_an_array_is_refused(tmp_path):
    """With a correct CRC, as of a file that was made to harm."""
    path = tmp_path / "episode_000000_2.npz"
    form = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }"
    shapes = ("<f4", "(1000000000000, 5)"), ("<f4", "(-3, -5)"), ("|O", "(3, 5)")
    no_literal = form % ("<f4", "(3, 5L)") + "\x00'"
    others = "(" * 3000, "__import__('os')", "{'descr': ['<f4'], 'fortran_order': 1, 'shape': 15, }", ""
    for header in (*(form % shape for shape in shapes), no_literal, *others):
        text = header.encode() + b"\n"
        path.write_bytes(archive(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(60)))
        with pytest.raises(DataError, match=r"observation\.npy has"):
            read_episode(episode_file(path), DOMAIN)


@pytest.mark.parametrize("declared", [True, False])
def test_a_small_file_takes_little_memory(tmp_path, declared):
    """A file of 65 kB that unpacks to 64 MiB, and says so or claims to be an episode."""
    content = bytearray(archive(bytes(1 << 26), zipfile.ZIP_DEFLATED))
    if not declared:
        for size in (22, content.index(b"PK\x01\x02") + 24):
            content[size : size + 4] = (188).to_bytes(4, "little")
    path = tmp_path / "episode_000000_2.npz"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataError):
        read_episode(episode_file(path), DOMAIN)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_exorl_episodes_become_a_store_and_datasets(tmp_path, explored):
    fill(tmp_path, explored, [100] * 10)
    (collector_folder(tmp_path, "cartpole", "mini_ou") / "buffer").mkdir(parents=True)  # ours, not ExoRL's
    environment, train, validation = stores.make_env_and_datasets("cartpole_swingup", data=tmp_path)
    assert stored_collectors(tmp_path, "cartpole") == ("rnd",)
    assert (len(train), len(validation)) == (9, 1)
    assert train[0].observation.shape == (100, *environment.observation_space.shape)
    assert exit_status(stores.main, "--domain", "cartpole", "--data", tmp_path) == 0


def test_without_episodes_our_own_mix_is_collected(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(stores, "collect", asked.append)
    with pytest.raises(DataError):  # as nothing was collected
        stores.make_env_and_datasets("walker_run", data=tmp_path)
    assert [(each.domain, each.collector, each.output) for each in asked] == [("walker", "mix", tmp_path)]
    assert "no ExoRL data" in capsys.readouterr().err
