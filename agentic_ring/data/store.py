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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentic_ring.data.domains import Domain, domain_named
from agentic_ring.data.sealed_hdf5 import FileKind, SealedReader, write_sealed
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
    """An episode with its rewards and labels in the store."""

    episode: Episode
    rewards: dict[str, np.ndarray]
    """Task name -> float32 [T + 1], row 0 being 0."""
    algorithm: str
    """Algorithm that chose the actions: ``td3``, ``rnd``, ``ou``, ``random``, or ExoRL's collector."""
    action_repeat: int
    """Control steps for which every action was held."""
    source: str
    """Name of the episode's file; unique within a store."""


class TrajectoryStore(SealedReader):
    """Read access to a store; a context manager.

    Attributes:
      collector: ExoRL's collector, or the one of ``data_prep.collect``.
      tasks: names of the tasks whose rewards are stored.
      num_episodes: number of episodes E.
      lengths: int32 [E], transitions of each episode.
      action_repeats: int32 [E].
      algorithms, sources: [E] names, see ``StoredEpisode``.
      learnable: bool [E], whether a policy (not noise) acted, so that the episode may be imitated.
    """

    kind = STORE

    def _read_tables(self) -> None:
        self.domain: Domain = domain_named(str(self._file.attrs["domain"]))
        self.collector = str(self._file.attrs["collector"])
        self.tasks: tuple[str, ...] = tuple(str(name) for name in np.asarray(self._file.attrs["tasks"]))
        self.lengths: np.ndarray = self._array("episodes/length")[:]
        self.num_episodes = len(self.lengths)
        self.action_repeats: np.ndarray = self._array("episodes/action_repeat")[:]
        self.algorithms: list[str] = list(self._array("episodes/algorithm").asstr()[:])
        self.sources: list[str] = list(self._array("episodes/source").asstr()[:])
        self.learnable = np.array([algorithm not in NOISE_ALGORITHMS for algorithm in self.algorithms])
        self._returns: dict[str, np.ndarray] = {}
        self._first_rows = np.concatenate([[0], np.cumsum(self.lengths.astype(np.int64) + 1)])
        rows = int(self._first_rows[-1])
        self._row_arrays = [*EPISODE_DTYPES, *(f"rewards/{task}" for task in self.tasks)]
        shapes = {name: self._array(name).shape for name in self._row_arrays}
        wrong = {name: shape for name, shape in shapes.items() if shape[0] != rows}
        if wrong:
            raise OSError(f"its episodes have {rows} rows, but arrays have shapes {wrong}")

    def _array(self, name: str) -> h5py.Dataset:
        array = self._file[name]
        if not isinstance(array, h5py.Dataset):
            raise KeyError(f"{name} is no array")
        return array

    @property
    def held_steps(self) -> int:
        """The largest number of control steps for which all actions are held."""
        return int(np.gcd.reduce(self.action_repeats))

    def require_held(self, action_repeat: int) -> None:
        """Raises a ``DataError`` if some actions are held for no multiple of ``action_repeat`` steps."""
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
        for name in self._row_arrays:
            for episode, length in enumerate(self.lengths):
                self._rows(name, episode, 0, int(length) + 1)
        super().verify()

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
        self._require(episode, start, stop, task)
        return Trajectory(
            observation=self._rows("observation", episode, start, stop),
            action=self._rows("action", episode, start + 1, stop + 1),
            reward=self._rows(f"rewards/{task}", episode, start + 1, stop + 1),
        )

    def rewards(self, episode: int, task: str) -> np.ndarray:
        """The reward of ``task`` at every transition of an episode, float32 [T]; raises as ``steps``."""
        self._require(episode, 0, 1, task)
        return self._rows(f"rewards/{task}", episode, 1, int(self.lengths[episode]) + 1)

    def episode(self, index: int) -> StoredEpisode:
        """Returns a whole episode, as it was given to the writer."""
        self._require(index, 0, 1)
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

    def _require(self, episode: int, start: int, stop: int, task: str | None = None) -> None:
        if task is not None and task not in self.tasks:
            raise UnknownNameError(f"task in {self.path.name}", task, self.tasks)
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
    found = (root / "store").glob(f"{domain}-*.h5")
    return tuple(sorted(path.stem.removeprefix(f"{domain}-") for path in found))


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
        file.attrs["domain"] = description.domain.name
        file.attrs["collector"] = description.collector
        file.attrs["tasks"] = list(description.tasks)
        widths = episode_widths(description.domain)
        arrays = {name: _growing(file, name, EPISODE_DTYPES[name], width) for name, width in widths.items()}
        rewards = {
            task: _growing(file, f"rewards/{task}", np.dtype(np.float32)) for task in description.tasks
        }
        labels: list[tuple[int, int, str, str]] = []
        for stored in episodes:
            absent = set(description.tasks) - set(stored.rewards)
            if absent:
                raise StoreError(f"{stored.source} has no reward of {sorted(absent)}; relabel it first")
            for name, array in arrays.items():
                _append(array, getattr(stored.episode, name))
            for task, array in rewards.items():
                _append(array, stored.rewards[task])
            labels.append((len(stored.episode), stored.action_repeat, stored.algorithm, stored.source))
            check_disk()
        if not labels:
            raise StoreError("there is no episode to write; nothing was written")
        lengths, repeats, algorithms, sources = zip(*labels, strict=True)
        if len(set(sources)) != len(sources):
            twice = next(source for source in sources if sources.count(source) > 1)
            raise StoreError(f"two episodes come from {twice}; a store may hold every source once")
        columns = {"length": np.array(lengths, np.int32), "action_repeat": np.array(repeats, np.int32)}
        for name, texts in (("algorithm", algorithms), ("source", sources)):
            encoded = [text.encode() for text in texts]
            columns[name] = np.array(encoded, h5py.string_dtype("utf-8", max(map(len, encoded))))
        for name, column in columns.items():
            file.create_dataset(f"episodes/{name}", data=column, chunks=True, fletcher32=True)
        return len(labels)


def _growing(file: h5py.File, name: str, dtype: np.dtype, *row: int) -> h5py.Dataset:
    # A chunk is about one episode, which is read at a time.
    chunks = (1024, *row)
    return file.create_dataset(name, (0, *row), dtype, maxshape=(None, *row), chunks=chunks, fletcher32=True)


def _append(array: h5py.Dataset, rows: np.ndarray) -> None:
    start = array.shape[0]
    array.resize(start + len(rows), axis=0)
    array[start:] = rows


MINIMUM_STD = 1e-3
"""Floor of an observation's standard deviation, which keeps constant entries near 0."""
TARGET_QUANTILE = 0.95


@dataclass(frozen=True)
class Scaling:
    """Scales measured once on the training data, stored with the run, used in training and rollouts.

    Attributes:
      observation_mean, observation_std: one value per entry of the observation.
      reward_scale: divisor of a decision's reward (the number of its steps).
      return_scale: divisor of returns-to-go (the best return of the data).
    """

    observation_mean: tuple[float, ...]
    observation_std: tuple[float, ...]
    reward_scale: float
    return_scale: float

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Normalises observations [..., O]."""
        mean = np.asarray(self.observation_mean, np.float32)
        return (observation - mean) / np.asarray(self.observation_std, np.float32)


def measure_scaling(store: TrajectoryStore, task: str, action_repeat: int) -> Scaling:
    """Measures the scaling on a store, reading every observation once; sums are in float64."""
    count = 0
    total = squares = np.zeros(store.domain.observation_dim)
    for episode, length in enumerate(store.lengths):
        observation = store.steps(episode, 0, int(length), task).observation.astype(np.float64)
        count += len(observation)
        total = total + observation.sum(axis=0)
        squares = squares + np.square(observation).sum(axis=0)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - np.square(mean), MINIMUM_STD**2))
    best = float(np.max(store.returns(task)))
    return Scaling(tuple(mean.tolist()), tuple(std.tolist()), float(action_repeat), best if best > 0 else 1.0)


def target_return(store: TrajectoryStore, task: str, quantile: float = TARGET_QUANTILE) -> float:
    """Returns a quantile of the returns in ``task`` of all trajectories in which a policy acted.

    Every trial aims at this return. It is chosen from the training data, never from results.
    """
    return float(np.quantile(store.returns(task)[store.learnable], quantile))
