import pickle
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_ring.data.sealed_hdf5 import seal
from agentic_ring.data.store import STORE, StoreDescription, TrajectoryStore, write_store
from agentic_ring.errors import ArgumentError, StoreError, UnknownNameError
from tests.commands import run_on_small_disk
from tests.data.synthetic import DOMAIN, TASKS, random_episode

DESCRIPTION = StoreDescription(DOMAIN, "mix", TASKS)


def random_episodes(lengths, seed=0, prefix="e"):
    generator = np.random.default_rng(seed)
    return [random_episode(generator, length, f"{prefix}{i}") for i, length in enumerate(lengths)]


algorithms = st.sampled_from(["td3", "rnd", "ou", "random", "größer"])
episode_sets = st.lists(st.tuples(st.integers(1, 40), algorithms, st.integers(1, 9)), min_size=1, max_size=8)


@given(contents=episode_sets, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_store_gives_back_what_was_written(contents, seed, tmp_path_factory):
    generator = np.random.default_rng(seed)
    episodes = [
        random_episode(generator, length, f"source-{i}", algorithm, repeat)
        for i, (length, algorithm, repeat) in enumerate(contents)
    ]
    path = tmp_path_factory.mktemp("store") / "cartpole-mix.h5"
    assert write_store(path, DESCRIPTION, episodes) == len(episodes)
    with TrajectoryStore.open(path) as store:
        store.verify()
        assert (store.domain, store.collector, store.tasks) == (DOMAIN, "mix", TASKS)
        assert store.lengths.tolist() == [length for length, _, _ in contents]
        for stored, expected in zip(store.episodes(), episodes, strict=True):
            np.testing.assert_equal(stored.rewards, expected.rewards)
            for name in ("algorithm", "action_repeat", "source"):
                assert getattr(stored, name) == getattr(expected, name)
            for name, array in vars(expected.episode).items():
                np.testing.assert_array_equal(getattr(stored.episode, name), array, strict=True)
        for task in TASKS:
            returns = [episode.rewards[task][1:].sum(dtype=np.float64) for episode in episodes]
            np.testing.assert_array_equal(store.returns(task), returns)
        for number, expected in enumerate(episodes):
            length = len(expected.episode)
            start = int(generator.integers(length))
            stop = int(generator.integers(start + 1, length + 1))
            found, after = store.steps(number, start, stop, TASKS[1]), slice(start + 1, stop + 1)
            steps = expected.episode.observation[start:stop], expected.episode.action[after]
            np.testing.assert_equal([*vars(found).values()], [*steps, expected.rewards[TASKS[1]][after]])


@pytest.fixture(scope="module")
def store_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "store.h5"
    write_store(path, DESCRIPTION, random_episodes([30, 20]))
    return path.read_bytes()


@pytest.fixture
def store_path(tmp_path, store_bytes):
    path = tmp_path / "store.h5"
    path.write_bytes(store_bytes)
    return path


@given(place=st.integers(0, 2**32 - 1), bit=st.integers(0, 7))
@settings(max_examples=300)
def test_any_flipped_bit_and_any_cut_is_found(place, bit, store_bytes, tmp_path_factory):
    path, position = tmp_path_factory.mktemp("damaged") / "store.h5", place % len(store_bytes)
    damaged = bytearray(store_bytes)
    damaged[position] ^= 1 << bit
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"store.h5"), TrajectoryStore.open(path) as store:
        store.verify()
    path.write_bytes(store_bytes[:position])
    with pytest.raises(StoreError, match=r"is truncated|is not an agentic_ring|damaged"):
        TrajectoryStore.open(path)


def test_damaged_rows_name_the_array_and_the_episode(store_path, store_bytes):
    contents = bytearray(store_bytes)
    contents[contents.index(random_episodes([30, 20])[1].episode.physics[3].tobytes())] ^= 1
    store_path.write_bytes(contents)
    with TrajectoryStore.open(store_path) as store:
        store.steps(1, 0, 20, "swingup")  # other arrays stay readable
        with pytest.raises(StoreError, match=r"physics is damaged in the rows of episode"):
            store.episode(1)


def test_absent_files_and_those_of_another_kind_or_version_are_refused(store_path, tmp_path):
    seal(store_path, replace(STORE, version=STORE.version + 1))
    with pytest.raises(StoreError, match=f"version {STORE.version + 1} .* reads version {STORE.version}"):
        TrajectoryStore.open(store_path)
    with h5py.File(store_path, "w") as file:
        file["x"] = [1, 2]
    with pytest.raises(StoreError, match=r"is not an agentic_ring"):
        TrajectoryStore.open(store_path)
    with pytest.raises(StoreError, match=r"there is no store at .*data_prep.exorl"):
        TrajectoryStore.open(tmp_path / "none.h5")


@pytest.mark.parametrize("name", ["physics", "rewards/swingup", "episodes/length", "episodes/source", None])
def test_a_missing_array_and_one_of_other_length_are_named(store_path, name):
    with h5py.File(store_path, "r+") as file:
        if name is None:
            file["action"].resize(7, axis=0)
        else:
            del file[name]
    seal(store_path, STORE)
    with pytest.raises(StoreError, match=r"52 rows.*action" if name is None else name.split("/")[-1]):
        TrajectoryStore.open(store_path)


def test_ranges_and_names_outside_the_store_are_refused(store_path):
    with TrajectoryStore.open(store_path) as store:
        with pytest.raises(ArgumentError, match=r"episode 2 is outside"):
            store.steps(2, 0, 1, "swingup")
        for start, stop in ((0, 31), (5, 5), (-1, 3), (6, 2)):
            with pytest.raises(ArgumentError, match=f"{start} to {stop} do not lie within the 30"):
                store.steps(0, start, stop, "swingup")
        for read in (lambda: store.returns("run"), lambda: store.steps(0, 0, 1, "run")):
            with pytest.raises(UnknownNameError, match=r"'run'.*swingup"):
                read()


def test_another_process_opens_the_store_for_itself(store_path):
    with TrajectoryStore.open(store_path) as store, pickle.loads(pickle.dumps(store)) as other:
        np.testing.assert_array_equal(other.returns("swingup"), store.returns("swingup"))


def test_failed_write_leaves_the_old_store_and_nothing_else(tmp_path):
    path = tmp_path / "store.h5"
    episodes = random_episodes([3, 4])
    write_store(path, DESCRIPTION, episodes)
    before = path.read_bytes()

    def failing():
        yield from episodes
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match=r"the source broke"):
        write_store(path, DESCRIPTION, failing())
    unrewarded = replace(episodes[0], rewards={"swingup": np.zeros(4, np.float32)})
    for bad, message in (
        ([*episodes, episodes[1]], "two episodes come from e1"),
        ([], "no episode"),
        ([unrewarded], "no reward of .'swingup_sparse'"),
    ):
        with pytest.raises(StoreError, match=message):
            write_store(path, DESCRIPTION, bad)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def fill(disk):
    path = disk / "store.h5"
    write_store(path, DESCRIPTION, random_episodes([3, 4]))
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device"):
        write_store(path, DESCRIPTION, (random_episodes([1000], prefix=f"{n}-")[0] for n in range(600)))
    assert path.read_bytes() == before
    assert list(disk.iterdir()) == [path]


def test_full_disk_leaves_the_old_store_and_nothing_else(tmp_path):
    """The disk has room for the first part of the store and what HDF5 has yet to write."""
    ended = run_on_small_disk(tmp_path, "67m", __name__, "test.fill(disk)")
    assert ended.returncode == 0, ended.stderr
