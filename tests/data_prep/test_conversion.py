import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import TrajectoryStore, store_path
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ConfigError, DataError, StoreError
from agentic_ring.files.json_files import json_row
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
from tests.commands import kill_once, run_python
from tests.data_prep.exploration import uniform_episodes

DOMAIN = DOMAINS["cartpole"]
COMMAND = ("-m", "data_prep.exorl", "--domain", "cartpole", "--collector", "rnd")


def environment(root):
    return os.environ | {"AGENTIC_RING_DATA": str(root)}


@pytest.fixture(scope="module")
def explored():
    return uniform_episodes(DOMAIN, ["swingup"] * 4, action_repeat=8)


def cut(episode, start, length):
    """A stretch of a real episode as an episode of its own; its physics fit its observations."""
    rows = slice(start, start + length + 1)
    arrays = {
        name: array[rows].copy() for name, array in vars(episode).items() if isinstance(array, np.ndarray)
    }
    arrays["action"][0] = 0
    arrays["reward"][0] = 0
    return Episode(**arrays)


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
    fill(tmp_path, explored, [1000, 990, 160, 1])
    summary = convert(config(tmp_path))
    assert summary.store == store_path(tmp_path, "cartpole", "rnd")
    assert (summary.episodes, summary.added, summary.skipped) == (4, 4, ())
    stored = contents(summary.store)
    for number, length in enumerate([1000, 990, 160, 1]):
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
    "length in name": (lambda path: path.rename(path.with_name("episode_000001_31.npz")), "31"),
    "name": (lambda path: path.rename(path.with_name("best.npz")), "name"),
}


@pytest.mark.parametrize(("damage", "reason"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_left_out_and_listed(tmp_path, explored, damage, reason):
    fill(tmp_path, explored, [30, 30, 30])
    damage(buffer_of(tmp_path) / "episode_000001_30.npz")
    summary = convert(config(tmp_path))
    assert summary.episodes == 2
    ((file, why),) = summary.skipped
    assert file.parent == buffer_of(tmp_path)
    assert re.search(reason, why), why
    assert set(contents(summary.store)) == {"rnd/episode_000000_30.npz", "rnd/episode_000002_30.npz"}


def test_mended_file_is_added_to_the_store(tmp_path, explored):
    fill(tmp_path, explored, [30, 30])
    truncate(buffer_of(tmp_path) / "episode_000001_30.npz")
    assert convert(config(tmp_path)).episodes == 1
    fill(tmp_path, explored, [30, 30, 40])
    before = contents(store_path(tmp_path, "cartpole", "rnd"))
    summary = convert(config(tmp_path))
    assert (summary.episodes, summary.added, summary.skipped) == (3, 2, ())
    after = contents(summary.store)
    for source, stored in before.items():
        np.testing.assert_array_equal(after[source].episode.physics, stored.episode.physics)


def test_without_any_valid_file_nothing_is_written(tmp_path, explored):
    fill(tmp_path, explored, [30])
    truncate(buffer_of(tmp_path) / "episode_000000_30.npz")
    with pytest.raises(DataError, match=r"none of the 1 files in .*not a readable"):
        convert(config(tmp_path))
    assert not store_path(tmp_path, "cartpole", "rnd").exists()


def test_episodes_of_an_unfinished_round_are_left_for_later(tmp_path, explored):
    """Until they have labels nothing says whether a policy acted in them."""
    folder = collector_folder(tmp_path, "cartpole", "mini_rnd")
    for index in (0, 1):
        write_episode(folder / "buffer", index, explored[index])
    (folder / SETTINGS_FILE).write_text("{}")
    first = min(path.name for path in (folder / "buffer").iterdir())
    label = EpisodeLabel(first, 0, "rnd", "ours", "rnd", 0, action_repeat=8)
    (folder / LABELS_FILE).write_text(json_row(asdict(label)))
    summary = convert(ConvertConfig(domain="cartpole", collector="mini_rnd", data=tmp_path))
    assert summary.episodes == 1
    with TrajectoryStore.open(summary.store) as store:
        assert store.sources == [f"mini_rnd/{first}"]


def test_without_data_it_says_where_to_get_them(tmp_path):
    with pytest.raises(
        DataError, match=r"(?s)rnd.buffer.*dl\.fbaipublicfiles\.com/exorl/cartpole/rnd\.zip.*collect"
    ):
        convert(config(tmp_path))


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
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    part=st.integers(1, 4),
    bad=st.sets(st.integers(0, 8)),
    split=st.integers(0, 9),
)
@settings(max_examples=10)
def test_any_set_of_episodes_arrives_once(explored, tmp_path_factory, lengths, part, bad, split):
    """Converted in one go or as files come in, in parts of any size, with bad files among them."""
    root = tmp_path_factory.mktemp("data")
    valid = [number for number in range(len(lengths)) if number not in bad]
    for group in (range(min(split, len(lengths))), range(min(split, len(lengths)), len(lengths))):
        for number in group:
            fill(root, explored, [lengths[number]], first=number)
            if number in bad:
                truncate(buffer_of(root) / f"episode_{number:06d}_{lengths[number]}.npz")
        try:
            summary = convert(config(root, part_episodes=part))
        except DataError:
            assert not any(number in valid for number in range(group.stop))
        else:
            assert len(summary.skipped) == sum(number in bad for number in range(group.stop))
    if valid:
        stored = contents(store_path(root, "cartpole", "rnd"))
        assert list(stored) == [f"rnd/episode_{number:06d}_{lengths[number]}.npz" for number in valid]


@pytest.mark.slow
def test_killed_conversion_goes_on_from_its_parts(tmp_path, explored):
    lengths = [1000 - number % 3 for number in range(28)]
    for number in range(28):
        write_episode(buffer_of(tmp_path), number, cut(explored[number % 4], 0, lengths[number]))
    store = store_path(tmp_path, "cartpole", "rnd")
    parts = store.with_name(store.name + ".parts")
    command = (*COMMAND, "--part-episodes", "4")
    process = subprocess.Popen([sys.executable, *command], env=environment(tmp_path))
    kill_once(process, lambda: len(list(parts.glob("part-*.h5"))) >= 2, seconds=60)
    assert not store.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.h5")}
    for part in finished:
        assert contents(parts / part)  # whole and verified, every one of them

    result = run_python(*command, env=environment(tmp_path))
    assert result.returncode == 0, result.stderr
    assert f"converting cartpole-rnd {28 - 4 * len(finished)}/{28 - 4 * len(finished)}" in result.stderr
    assert sorted(contents(store)) == [f"rnd/episode_{n:06d}_{lengths[n]}.npz" for n in range(28)]
    assert [path.name for path in store.parent.iterdir()] == [store.name]


def test_parts_left_behind_by_a_finished_merge_are_not_added_again(tmp_path, explored):
    fill(tmp_path, explored, [30, 30])
    store = convert(config(tmp_path)).store
    parts = store.with_name(store.name + ".parts")
    parts.mkdir()
    (parts / "part-000000.h5").write_bytes(store.read_bytes())
    fill(tmp_path, explored, [30], first=2)
    assert convert(config(tmp_path)).episodes == 3
    assert not parts.exists()


def test_processes_of_their_own_convert_to_the_same_store(tmp_path, explored):
    lengths = [30 + number for number in range(12)]
    for root in (tmp_path / "one", tmp_path / "two"):
        fill(root, explored, lengths)
        truncate(buffer_of(root) / "episode_000005_35.npz")
    one = convert(config(tmp_path / "one", processes=1, part_episodes=5))
    two = convert(config(tmp_path / "two", processes=2, part_episodes=5))
    assert [file.name for file, _ in one.skipped] == ["episode_000005_35.npz"]
    assert [(file.name, why) for file, why in one.skipped] == [(file.name, why) for file, why in two.skipped]
    assert one.store.read_bytes() == two.store.read_bytes()


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
