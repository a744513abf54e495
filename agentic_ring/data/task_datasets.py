"""The environment and the trajectories of a task, by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from agentic_ring.data.domains import parse_task
from agentic_ring.data.store import TrajectoryStore, data_root, store_path, stored_collectors
from agentic_ring.data.trajectories import Trajectory
from agentic_ring.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    import gymnasium

VALIDATION_STRIDE = 10
"""One in this many episodes is for validation, spread evenly over the order of collection."""


class TrajectoryDataset(Sequence[Trajectory]):
    """Whole ``episodes`` of a store with the rewards of one task, given by its short name.

    A streaming dataset reads an episode whenever it is asked for, so the store must stay open.

    Attributes:
      algorithms: algorithm that acted in each episode, [N]; ``random`` and ``ou`` are noise.
      returns: undiscounted return of each episode, float64 [N].
    """

    def __init__(self, store: TrajectoryStore, task: str, episodes: Sequence[int], streaming: bool = False):
        self._store = store
        self._task = task
        self._episodes = [int(episode) for episode in episodes]
        self.algorithms = [store.algorithms[episode] for episode in self._episodes]
        self.returns = store.returns(task)[self._episodes]
        self._loaded = None if streaming else [self._read(episode) for episode in self._episodes]

    def __len__(self) -> int:
        """N, the number of episodes."""
        return len(self._episodes)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        """The episode with this index, or a list of several; a ``StoreError`` if it is damaged."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._read(self._episodes[index]) if self._loaded is None else self._loaded[index]

    def _read(self, episode: int) -> Trajectory:
        return self._store.steps(episode, 0, int(self._store.lengths[episode]), self._task)


def make_env_and_datasets(
    task: str, collector: str | None = None, data: Path | str | None = None, streaming: bool = False
) -> "tuple[gymnasium.Env, TrajectoryDataset, TrajectoryDataset]":
    """Makes the environment of a task, and opens its trajectories for training and for validation.

    One in ten episodes is for validation. ``data_prep.stores.make_env_and_datasets`` collects missing ones.

    Args:
      task: full name, such as ``walker_run``; its rewards are those of the trajectories.
      collector: who collected them: ``mix`` for our own, or one of ExoRL's; None takes the only one there is.
      data: data folder; None is ``$AGENTIC_RING_DATA`` or ``data``.
      streaming: read each episode when it is asked for; otherwise all are in memory.

    Raises:
      UnknownNameError: there is no such task, or no store of this collector.
      DataError: there is no store of the domain.
      ConfigError: there are stores of several collectors and none was chosen.
      StoreError: the store cannot be read.
    """
    from agentic_ring.data.gymnasium_environments import make  # loads gymnasium

    parsed, root = parse_task(task), data_root() if data is None else Path(data)
    known = stored_collectors(root, parsed.domain.name)
    if not known:
        raise DataError(
            f"there is no store {store_path(root, parsed.domain.name, collector or 'mix')}; in a checkout "
            f"`python -m data_prep.stores --domain {parsed.domain.name}` makes one"
        )
    if collector is None and len(known) > 1:
        raise ConfigError(
            f"{root} has several collectors of {parsed.domain.name}; choose one: {', '.join(known)}"
        )
    chosen = collector or next(iter(known))
    if chosen not in known:
        raise UnknownNameError(f"collector of {parsed.domain.name} in {root / 'store'}", chosen, known)
    environment = make(task)  # fails before the episodes are read
    store = TrajectoryStore.open(store_path(root, parsed.domain.name, chosen))
    validation = np.arange(store.num_episodes) % VALIDATION_STRIDE == VALIDATION_STRIDE - 1
    train, held_out = (
        TrajectoryDataset(store, parsed.name, np.flatnonzero(part).tolist(), streaming)
        for part in (~validation, validation)
    )
    if not streaming:
        store.close()
    return environment, train, held_out
