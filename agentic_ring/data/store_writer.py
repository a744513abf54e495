"""Writes trajectory stores atomically and with checksums."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentic_ring.data.sealed_hdf5 import write_sealed
from agentic_ring.data.store import STORE, StoredEpisode, TrajectoryStore
from agentic_ring.data.tasks import Domain
from agentic_ring.data.trajectories import EPISODE_DTYPES, episode_widths
from agentic_ring.errors import StoreError
from agentic_ring.extras import needs_extra

with needs_extra("models"):
    import h5py

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
