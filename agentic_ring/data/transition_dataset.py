"""Transitions of a store in memory, for baselines that train on single transitions or short windows.

A batch depends only on the seed and its number, as with chains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from agentic_ring.data.hindsight_chains import returns_to_go
from agentic_ring.data.store import Scaling, TrajectoryStore
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.models.baselines import WindowBatch, Windows


@dataclass(frozen=True)
class TransitionDataset:
    """Rows of chosen episodes, concatenated; each episode ends with a row for its final observation."""

    observation: np.ndarray
    """float32 [R, O], normalised."""
    action: np.ndarray
    """float32 [R, A]."""
    reward: np.ndarray
    """float32 [R], reward of each decision, scaled."""
    return_to_go: np.ndarray
    """float32 [R], return of the episode from there on, scaled."""
    timestep: np.ndarray
    """int32 [R] within the episode, in decisions."""
    rows: np.ndarray
    """Int [N], indices of the rows that are decisions."""

    def transitions(self, generator: np.random.Generator, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Draws transitions uniformly: observation, next_observation [*shape, O], action, reward."""
        rows = self.rows[generator.integers(len(self.rows), size=shape)]
        return {
            "observation": self.observation[rows],
            "action": self.action[rows],
            "reward": self.reward[rows],
            "next_observation": self.observation[rows + 1],
        }

    def windows(
        self, generator: np.random.Generator, count: int, length: int, loss_extent: Literal["all", "last"]
    ) -> WindowBatch:
        """Draws windows [count, length] whose last decisions are uniform over all decisions.

        ``loss_extent`` names the actions of a window that bear loss.
        """
        last = self.rows[generator.integers(len(self.rows), size=count)]
        rows = last[:, None] + np.arange(1 - length, 1)
        present = rows >= (last - self.timestep[last])[:, None]
        rows = np.where(present, rows, last[:, None])

        names = "return_to_go", "observation", "action", "timestep"
        fields = {name: getattr(self, name)[rows] for name in names}
        for values in fields.values():
            values[~present] = 0
        windows = Windows(**fields, present=present)
        weight = present.astype(np.float32)
        if loss_extent == "last":
            weight[:, :-1] = 0
        return WindowBatch(windows, weight)


def read_transitions(
    store: TrajectoryStore, task: str, action_repeat: int, scaling: Scaling, episodes: np.ndarray
) -> TransitionDataset:
    """Reads the episodes with these indices into memory.

    Raises:
      DataError: there are no episodes, or the store's actions are not held for ``action_repeat`` steps.
    """
    store.require_held(action_repeat)
    if not len(episodes):
        raise DataError(f"no episode of {store.path} was chosen; training needs at least one")

    def read(index: int) -> dict[str, np.ndarray]:
        stored = store.episode(index)
        starts = np.arange(0, len(stored.episode), action_repeat)
        earned = np.add.reduceat(stored.rewards[task][1:].astype(np.float64), starts)
        to_go = returns_to_go(np.append(earned, 0.0), float(earned.sum()))
        return {
            "observation": scaling.observation(stored.episode.observation[np.append(starts, -1)]),
            "action": np.concatenate([stored.episode.action[starts + 1], stored.episode.action[:1]]),
            "reward": (np.append(earned, 0.0) / scaling.reward_scale).astype(np.float32),
            "return_to_go": to_go / np.float32(scaling.return_scale),
            "timestep": np.arange(len(starts) + 1, dtype=np.int32),
        }

    parts = [read(int(episode)) for episode in episodes]
    ends = np.cumsum([len(part["reward"]) for part in parts])
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return TransitionDataset(**joined, rows=np.setdiff1d(np.arange(ends[-1]), ends - 1))


def best_episodes(
    returns: np.ndarray, lengths: np.ndarray, learnable: np.ndarray, share: float
) -> np.ndarray:
    """Selects the best episodes that together have ``share`` of the steps of all learnable ones; all [E].

    Returns:
      Indices in order of descending return, at least one.

    Raises:
      ConfigError: the share is not in (0, 1].
      DataError: a policy acted in no episode.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share of best episodes is {share}; expected one in (0, 1]")
    candidates = np.flatnonzero(learnable)
    if not len(candidates):
        raise DataError("no policy acted in any episode, so there is nothing to imitate; collect more")
    best_first = candidates[np.argsort(-returns[candidates], kind="stable")]
    steps = np.cumsum(lengths[best_first])
    return best_first[: max(1, int(np.searchsorted(steps, share * steps[-1], side="right")))]


class RandomBatches:
    """An endless iterator of batches; ``seed`` and the number of a batch seed its random generator."""

    def __init__(self, draw: Callable[[np.random.Generator], Any], seed: int):
        self._draw = draw
        self._seed = seed
        self._number = 0

    def __next__(self) -> Any:
        """Returns the next batch."""
        batch = self._draw(np.random.default_rng((self._seed, self._number)))
        self._number += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the iterator's state, from which ``set_state`` continues."""
        return {"batch": self._number}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state."""
        self._number = state["batch"]
