"""Conversion of episode files to a store: every valid episode once, bad files listed, resumable."""

import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import TrajectoryStore, store_path
from agentic_ring.errors import ConfigError, DataError, StoreError
from agentic_ring.files.json_files import json_row
from data_prep import conversion
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import (
    LABELS_FILE,
    SETTINGS_FILE,
    EpisodeFile,
    EpisodeLabel,
    Source,
    as_exorl_loads,
    collector_folder,
    write_episode,
)
from tests.data_prep.exploration import cut, uniform_episodes

DOMAIN = DOMAINS["cartpole"]


@pytest.fixture(scope="module")
def explored():
    return uniform_episodes(DOMAIN, ["swingup"] * 4, action_repeat=8)


def buffer_of(root, collector="rnd"):
    buffer = collector_folder(root, "cartpole", collector) / "buffer"
    buffer.mkdir(parents=True, exist_ok=True)
    return buffer


def config(root, **changes):
    return ConvertConfig(domain="cartpole", collector="rnd", data=root, **changes)


def fill(root, explored, lengths, first=0):
    for number, length in enumerate(lengths, start=first):
        write_episode(buffer_of(root), number, cut(explored[number % 4], 8 * (number % 50), length))


def contents(path):
    with TrajectoryStore.open(path) as store:
        store.verify()
        return {stored.source: stored for stored in store.episodes()}


def test_episodes_arrive_unchanged_with_the_rewards_that_were_paid(tmp_path, explored):
    lengths = [1000, 160, 1]
    fill(tmp_path, explored, lengths)
    summary = convert(config(tmp_path))
    assert summary.store == store_path(tmp_path, "cartpole", "rnd")
    assert (summary.episodes, summary.added, summary.skipped) == (3, 3, ())
    stored = contents(summary.store)
    for number, length in enumerate(lengths):
        expected = cut(explored[number], 8 * number, length)
        got = stored[f"rnd/episode_{number:06d}_{length}.npz"]
        for name in ("observation", "action", "reward", "discount", "physics"):
            np.testing.assert_array_equal(getattr(got.episode, name), getattr(expected, name), strict=True)
        np.testing.assert_array_equal(got.rewards["swingup"], expected.reward[:, 0])
        assert got.algorithm == "rnd"
        assert got.action_repeat == (8 if length > 1 else 1)
    assert sorted(path.name for path in summary.store.parent.iterdir()) == ["cartpole-rnd.h5"]


def rewritten(change):
    """Reads an episode file, lets ``change`` alter its arrays, and writes it back."""

    def damage(path):
        with np.load(path) as file:
            arrays = dict(file)
        change(arrays)
        np.savez_compressed(path, **arrays)

    return damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-200])


def store_bare_array(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


BAD_FILES = {
    "truncated": (truncate, "readable"),
    "bare array": (store_bare_array, "not a zip file"),
    "pickled": (rewritten(lambda a: a.update(reward=np.array([{}, None], dtype=object))), "pickles"),
    "wrong dtype": (rewritten(lambda a: a.update(action=a["action"].astype(float))), "float64"),
    "other physics": (rewritten(lambda a: a.update(physics=a["physics"] + 0.5)), "physics and observation"),
    "length in name": (lambda path: path.rename(str(path).replace("_30.npz", "_31.npz")), "says 31"),
    "name": (lambda path: path.rename(path.with_name("best.npz")), "name"),
}


def test_bad_files_are_left_out_and_listed(tmp_path, explored):
    fill(tmp_path, explored, [30] * (len(BAD_FILES) + 2))
    files = sorted(buffer_of(tmp_path).iterdir())
    for (damage, _), file in zip(BAD_FILES.values(), files[1:], strict=False):
        damage(file)
    summary = convert(config(tmp_path))
    assert set(contents(summary.store)) == {f"rnd/{files[0].name}", f"rnd/{files[-1].name}"}
    # Those with a bad name come first.
    reasons = [why for _, why in (*summary.skipped[1:], summary.skipped[0])]
    assert len(reasons) == len(BAD_FILES)
    for (_, expected), why in zip(BAD_FILES.values(), reasons, strict=True):
        assert re.search(expected, why), why


def test_without_any_valid_file_nothing_is_written(tmp_path, explored):
    with pytest.raises(
        DataError, match=r"(?s)rnd.buffer.*dl\.fbaipublicfiles\.com/exorl/cartpole/rnd\.zip.*collect"
    ):
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
    (folder / SETTINGS_FILE).write_text("{}")
    labels = [EpisodeLabel(names[n], n, "rnd", "ours", "ou", 0, action_repeat=(4, 16)[n]) for n in range(2)]
    (folder / LABELS_FILE).write_text("".join(json_row(asdict(label)) for label in labels))
    summary = convert(ConvertConfig(domain="cartpole", collector="mini_rnd", data=tmp_path))
    assert [(file.name, why[-2:]) for file, why in summary.skipped] == [(names[1], "16")]
    with TrajectoryStore.open(summary.store) as store:
        assert (store.sources, store.algorithms) == ([f"mini_rnd/{names[0]}"], ["ou"])
        assert store.action_repeats.tolist() == [4]


def test_max_episodes_are_spread_over_the_order_of_collection(tmp_path, explored):
    fill(tmp_path, explored, [10] * 12)
    summary = convert(config(tmp_path, max_episodes=4))
    indices = [int(source.split("_")[1]) for source in contents(summary.store)]
    assert indices == [1, 4, 7, 10]


def test_old_store_that_is_damaged_stops_the_conversion(tmp_path, explored):
    fill(tmp_path, explored, [30, 30])
    store = convert(config(tmp_path)).store
    damaged = bytearray(store.read_bytes())
    damaged[-3000] ^= 1
    store.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"cartpole-rnd.h5"):
        convert(config(tmp_path))
    assert store.read_bytes() == damaged


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    part=st.integers(1, 4),
    bad=st.sets(st.integers(0, 8)),
    split=st.integers(0, 9),
)
@settings(max_examples=5)
def test_any_set_of_episodes_arrives_once(explored, tmp_path_factory, lengths, part, bad, split):
    """Converted as files come in and are mended, in parts of any size, with bad files among them."""
    root = tmp_path_factory.mktemp("data")
    valid = [number for number in range(len(lengths)) if number not in bad]
    for end in (min(split, len(lengths)), len(lengths)):
        fill(root, explored, lengths[:end])
        for number in bad & set(range(end)):
            truncate(buffer_of(root) / f"episode_{number:06d}_{lengths[number]}.npz")
        try:
            summary = convert(config(root, part_episodes=part))
        except DataError:
            assert not any(number < end for number in valid)
        else:
            assert len(summary.skipped) == sum(number < end for number in bad)
            assert list(contents(summary.store)) == names_of(lengths, [n for n in valid if n < end])
    fill(root, explored, lengths)
    summary = convert(config(root, part_episodes=part))
    assert (summary.added, summary.skipped) == (len(lengths) - len(valid), ())
    assert set(contents(summary.store)) == set(names_of(lengths, range(len(lengths))))


def names_of(lengths, numbers):
    return [f"rnd/episode_{number:06d}_{lengths[number]}.npz" for number in numbers]


def test_stopped_conversion_goes_on_from_its_parts(tmp_path, explored, monkeypatch, capsys):
    lengths = [30] * 10
    fill(tmp_path, explored, lengths)
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
    convert(config(tmp_path, part_episodes=3))
    assert "converting cartpole-rnd 4/4" in capsys.readouterr().err
    assert list(contents(store)) == names_of(lengths, range(10))
    assert [path.name for path in store.parent.iterdir()] == [store.name]

    # Parts that a finished merge has left behind are not added again.
    parts.mkdir()
    (parts / "part-000000.h5").write_bytes(store.read_bytes())
    fill(tmp_path, explored, [30], first=10)
    assert convert(config(tmp_path)).episodes == 11
    assert not parts.exists()


def test_processes_of_their_own_convert_to_the_same_store(tmp_path, explored):
    lengths = [30 + number for number in range(12)]
    summaries = []
    for processes in (1, 2):
        root = tmp_path / str(processes)
        fill(root, explored, lengths)
        truncate(buffer_of(root) / "episode_000005_35.npz")
        summaries.append(convert(config(root, processes=processes, part_episodes=5)))
    one, two = ([(file.name, why) for file, why in summary.skipped] for summary in summaries)
    assert one == two
    assert [name for name, _ in one] == ["episode_000005_35.npz"]
    assert summaries[0].store.read_bytes() == summaries[1].store.read_bytes()


def test_exorl_compat_is_a_store_of_its_own_with_controls_forgotten(tmp_path, explored):
    fill(tmp_path, explored, [100, 100])
    exact, compat = convert(config(tmp_path)), convert(config(tmp_path, exorl_compat=True))
    assert compat.store == store_path(tmp_path, "cartpole", "rnd-exorl_compat")
    for paid, forgotten in zip(contents(exact.store).values(), contents(compat.store).values(), strict=True):
        assert forgotten.rewards["swingup"].sum() > paid.rewards["swingup"].sum()
        np.testing.assert_array_equal(forgotten.episode.reward, paid.episode.reward)
    with pytest.raises(ConfigError, match="max_episodes"):
        config(tmp_path, exorl_compat=True, max_episodes=3)


@pytest.mark.parametrize(("length", "last"), [(1000, 1003), (250, 4003)])
def test_exorl_compat_takes_the_episodes_that_its_loader_gets_to(length, last):
    files = [EpisodeFile(Path(f"episode_{index:06d}_{length}.npz"), index, length) for index in range(10_000)]
    loaded = as_exorl_loads([Source(file, file.path.name, None) for file in files])
    assert [source.file.index for source in loaded] == list(range(last + 1))
