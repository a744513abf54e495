"""The trajectory store: one HDF5 file that holds every episode of a domain and collector.

    attributes           domain, collector
    observation          float32 [R, O]    rows of all episodes, concatenated; episode e has length[e] + 1
    action               float32 [R, A]    rows, the first of which is its reset row
    reward               float32 [R, 1]    as recorded
    discount             float32 [R, 1]
    physics              float64 [R, P]
    rewards/{task}       float32 [R]       for each task of the domain, computed from ``physics``
    episodes/length      int32 [E]         transitions
    episodes/action_repeat  int32 [E]
    episodes/algorithm   string [E]
    episodes/source      string [E]        name of the episode's file

Every array has fletcher32 checksums, the whole file a digest (``sealed_hdf5.py``). A store is never
modified: ``write_store`` writes a new one and renames it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from agentic_ring.data.sealed_hdf5 import FileKind, SealedReader, write_sealed
from agentic_ring.data.tasks import Domain, domain_named
from agentic_ring.data.trajectories import EPISODE_DTYPES, Episode, Trajectory, episode_widths
from agentic_ring.errors import ArgumentError, DataError, StoreError, UnknownNameError
from agentic_ring.extras import needs_extra

with needs_extra("models"):
    import h5py

STORE = FileKind(
    name="agentic_ring trajectory store",
    version=1,
    noun="store",
    command="python -m data_prep.exorl",
    rewrite="convert the episodes again",
)
# Algorithms whose actions are noise: no policy should imitate them, so they bear no loss.
NOISE_ALGORITHMS = frozenset({"random", "ou"})


@dataclass(frozen=True)
class StoredEpisode:
    """An episode with its rewards and labels in the store.

    Attributes:
      rewards: task name -> float32 [T + 1], row 0 being 0.
      algorithm: algorithm that chose the actions: ``td3``, ``rnd``, ``ou``, ``random``, or ExoRL's collector.
      action_repeat: control steps for which every action was held.
      source: name of the episode's file; unique within a store.
    """

    episode: Episode
    rewards: dict[str, np.ndarray]
    algorithm: str
    action_repeat: int
    source: str


class TrajectoryStore(SealedReader):
    """Read access to a store; a context manager.

    Attributes:
      collector: ExoRL's collector, or the one of ``data_prep.collect``.
      tasks: names of the tasks whose rewards are stored.
      lengths: int32 [E], transitions of each episode.
      action_repeats: int32 [E].
      algorithms: [E] names, see ``StoredEpisode``.
      sources: [E] file names.
    """

    kind = STORE

    def _read_tables(self) -> None:
        self.domain: Domain = domain_named(str(self._file.attrs["domain"]))
        self.collector = str(self._file.attrs["collector"])
        self.tasks: tuple[str, ...] = tuple(str(name) for name in np.asarray(self._file.attrs["tasks"]))
        self.lengths: np.ndarray = self._array("episodes/length")[:]
        self.action_repeats: np.ndarray = self._array("episodes/action_repeat")[:]
        self.algorithms: list[str] = list(self._array("episodes/algorithm").asstr()[:])
        self.sources: list[str] = list(self._array("episodes/source").asstr()[:])
        self._first_rows = np.concatenate([[0], np.cumsum(self.lengths.astype(np.int64) + 1)])
        rows = int(self._first_rows[-1])
        shapes = {name: array.shape for name, array in self._row_arrays().items()}
        wrong = {name: shape for name, shape in shapes.items() if shape[0] != rows}
        if wrong:
            raise OSError(f"its episodes have {rows} rows, but arrays have shapes {wrong}")

    def _array(self, name: str) -> h5py.Dataset:
        array = self._file[name]
        if not isinstance(array, h5py.Dataset):
            raise KeyError(f"{name} is no array")
        return array

    def _row_arrays(self) -> dict[str, h5py.Dataset]:
        names = [*EPISODE_DTYPES, *(f"rewards/{task}" for task in self.tasks)]
        return {name: self._array(name) for name in names}

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.lengths)

    @property
    def learnable(self) -> np.ndarray:
        """Whether a policy (not noise) acted in each episode, so that it may be imitated: bool [E]."""
        return np.array([algorithm not in NOISE_ALGORITHMS for algorithm in self.algorithms])

    @property
    def held_steps(self) -> int:
        """The largest number of control steps for which all actions are held."""
        return int(np.gcd.reduce(self.action_repeats))

    def require_held(self, action_repeat: int) -> None:
        """Checks that decisions of ``action_repeat`` steps can be read from the episodes.

        Raises:
          DataError: some actions are not held that long.
        """
        held = self.held_steps
        if held % action_repeat:
            raise DataError(
                f"the trajectories hold an action for {held} steps, so decisions of {action_repeat} "
                f"steps cannot be read from them; use an action repeat that divides {held}"
            )

    def verify(self) -> None:
        """Reads the whole file and checks it.

        Raises:
          StoreError: a byte differs from what was written; the error names the damaged array if possible.
        """
        for name in self._row_arrays():
            for episode in range(self.num_episodes):
                self._rows(name, episode, 0, int(self.lengths[episode]) + 1)
        super().verify()

    @cached_property
    def _returns(self) -> dict[str, np.ndarray]:
        return {}

    def returns(self, task: str) -> np.ndarray:
        """Returns the undiscounted return of every episode in ``task``: float64 [E].

        Raises:
          UnknownNameError: the store has no rewards of this task.
        """
        if task not in self._returns:
            rewards = (self.rewards(episode, task) for episode in range(self.num_episodes))
            self._returns[task] = np.array([reward.sum(dtype=np.float64) for reward in rewards])
        return self._returns[task]

    def steps(self, episode: int, start: int, stop: int, task: str) -> Trajectory:
        """Returns transitions ``start`` to ``stop`` (exclusive) of an episode, with the reward of ``task``.

        Raises:
          ArgumentError: the episode or the range does not exist.
          StoreError: the rows are damaged.
          UnknownNameError: the store has no rewards of this task.
        """
        self._require_task(task)
        self._require_range(episode, start, stop)
        return Trajectory(
            observation=self._rows("observation", episode, start, stop),
            action=self._rows("action", episode, start + 1, stop + 1),
            reward=self._rows(f"rewards/{task}", episode, start + 1, stop + 1),
        )

    def rewards(self, episode: int, task: str) -> np.ndarray:
        """Returns the reward of ``task`` at every transition of an episode: float32 [T].

        Raises:
          ArgumentError, StoreError, UnknownNameError: as in ``steps``.
        """
        self._require_task(task)
        self._require_range(episode, 0, 1)
        return self._rows(f"rewards/{task}", episode, 1, int(self.lengths[episode]) + 1)

    def episode(self, index: int) -> StoredEpisode:
        """Returns a whole episode, as it was given to the writer."""
        self._require_range(index, 0, 1)
        rows = int(self.lengths[index]) + 1
        return StoredEpisode(
            episode=Episode(**{name: self._rows(name, index, 0, rows) for name in EPISODE_DTYPES}),
            rewards={task: self._rows(f"rewards/{task}", index, 0, rows) for task in self.tasks},
            algorithm=self.algorithms[index],
            action_repeat=int(self.action_repeats[index]),
            source=self.sources[index],
        )

    def episodes(self) -> Iterator[StoredEpisode]:
        """Yields all episodes in order; memory holds one at a time."""
        return map(self.episode, range(self.num_episodes))

    def _rows(self, name: str, episode: int, start: int, stop: int) -> np.ndarray:
        first = self._first_rows[episode]
        try:
            return self._array(name)[first + start : first + stop]
        except OSError as error:
            raise StoreError(
                f"{self.path}: array {name} is damaged in the rows of episode {episode} "
                f"({self.sources[episode]}): {error}; delete the store and {STORE.rewrite}"
            ) from error

    def _require_task(self, task: str) -> None:
        if task not in self.tasks:
            raise UnknownNameError(f"task in {self.path.name}", task, self.tasks)

    def _require_range(self, episode: int, start: int, stop: int) -> None:
        if not 0 <= episode < self.num_episodes:
            raise ArgumentError(f"episode {episode} is outside the store's 0 to {self.num_episodes - 1}")
        if not 0 <= start < stop <= self.lengths[episode]:
            raise ArgumentError(
                f"transitions {start} to {stop} do not lie within the {self.lengths[episode]} of "
                f"episode {episode}"
            )


def data_root() -> Path:
    """``$AGENTIC_RING_DATA``, or ``data`` in the working directory."""
    return Path(os.environ.get("AGENTIC_RING_DATA") or "data")


def store_path(root: Path, domain: str, collector: str) -> Path:
    """The HDF5 store."""
    return root / "store" / f"{domain}-{collector}.h5"


def stored_collectors(root: Path, domain: str) -> tuple[str, ...]:
    """Returns the collectors of which there is a store of this domain, sorted."""
    first, last = store_path(root, domain, "*").name.split("*")
    found = store_path(root, domain, "*").parent.glob(f"{first}*{last}")
    return tuple(sorted(path.name.removeprefix(first).removesuffix(last) for path in found))


_CHUNK_ROWS = 1024  # about one episode, which is read at a time
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class StoreDescription:
    """Attributes that all episodes of a store share."""

    domain: Domain
    collector: str
    tasks: tuple[str, ...]


def write_store(path: Path, description: StoreDescription, episodes: Iterable[StoredEpisode]) -> int:
    """Writes a new store, or replaces the one at ``path``, and returns the number of episodes.

    Memory holds one episode at a time. ``path`` is unchanged until the last byte is on disk; a failure leaves
    no file behind.

    Raises:
      StoreError: there is no episode, two have the same source, or one lacks the rewards of a task.
      OSError: the disk is full.
    """
    with write_sealed(path, STORE) as (file, check_disk):
        return _write(file, check_disk, description, episodes)


def merge_stores(path: Path, description: StoreDescription, stores: Sequence[TrajectoryStore]) -> int:
    """Writes the episodes of ``stores``, in that order, to one store at ``path``; see ``write_store``."""
    return write_store(path, description, (episode for store in stores for episode in store.episodes()))


def _write(
    file: h5py.File,
    check_disk: Callable[[], None],
    description: StoreDescription,
    episodes: Iterable[StoredEpisode],
) -> int:
    widths = episode_widths(description.domain)
    file.attrs["domain"] = description.domain.name
    file.attrs["collector"] = description.collector
    file.attrs["tasks"] = list(description.tasks)
    arrays = {name: _growing(file, name, (width,), EPISODE_DTYPES[name]) for name, width in widths.items()}
    rewards = {task: _growing(file, f"rewards/{task}", (), _FLOAT32) for task in description.tasks}
    lengths: list[int] = []
    repeats: list[int] = []
    algorithms: list[str] = []
    sources: list[str] = []
    for stored in episodes:
        absent = set(description.tasks) - set(stored.rewards)
        if absent:
            raise StoreError(f"{stored.source} has no reward of {sorted(absent)}; relabel it first")
        for name, array in arrays.items():
            _append(array, getattr(stored.episode, name))
        for task, array in rewards.items():
            _append(array, stored.rewards[task])
        lengths.append(len(stored.episode))
        repeats.append(stored.action_repeat)
        algorithms.append(stored.algorithm)
        sources.append(stored.source)
        check_disk()
    if not lengths:
        raise StoreError("there is no episode to write; nothing was written")
    if len(set(sources)) != len(sources):
        twice = next(source for source in sources if sources.count(source) > 1)
        raise StoreError(f"two episodes come from {twice}; a store may hold every source once")
    table = file.create_group("episodes")
    table.create_dataset("length", data=np.array(lengths, np.int32), chunks=True, fletcher32=True)
    table.create_dataset("action_repeat", data=np.array(repeats, np.int32), chunks=True, fletcher32=True)
    for name, names in (("algorithm", algorithms), ("source", sources)):
        encoded = [text.encode() for text in names]
        dtype = h5py.string_dtype("utf-8", max(map(len, encoded)))
        table.create_dataset(name, data=np.array(encoded, dtype), chunks=True, fletcher32=True)
    return len(lengths)


def _growing(file: h5py.File, name: str, row: tuple[int, ...], dtype: np.dtype) -> h5py.Dataset:
    maxshape, chunks = (None, *row), (_CHUNK_ROWS, *row)
    return file.create_dataset(name, (0, *row), dtype, maxshape=maxshape, chunks=chunks, fletcher32=True)


def _append(array: h5py.Dataset, rows: np.ndarray) -> None:
    start = array.shape[0]
    array.resize(start + len(rows), axis=0)
    array[start:] = rows
