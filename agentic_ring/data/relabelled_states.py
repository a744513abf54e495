"""Random states of stored trajectories and their rewards: what tells a zero-shot agent its task."""

from collections.abc import Sequence

import numpy as np

from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.told_chains import RewardScale
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.errors import DataError

_SCALE_EPISODES = 64
"""Episodes, about, on which a reward function's mean and deviation are measured."""


class RelabelledStates:
    """Draws states from all over the data; their rewards are in deviations from the function's mean.

    Args:
      data: the store's decisions.
      rewards: reward functions.

    Raises:
      DataError: there is no reward function.
    """

    def __init__(self, data: ToldDecisions, rewards: Sequence[RewardOfFeatures]):
        if not rewards:
            raise DataError("there is no reward function to relabel with; draw more, or collect broader data")
        self._data, self._rewards = data, rewards
        some = data.step_features(slice(None, None, -(-len(data.action) // _SCALE_EPISODES)))
        self._scales = [RewardScale.of(reward(some)) for reward in rewards]

    def draw_functions(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Numbers of ``count`` reward functions, int [count]."""
        return random.integers(len(self._rewards), size=count)

    def pairs(
        self, random: np.random.Generator, functions: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Observations [K, count, O] of random states, and their rewards [K, count] by K functions."""
        shape, (episodes, decisions) = (len(functions), count), self._data.action.shape[:2]
        rows = random.integers(episodes, size=shape), random.integers(1, decisions, size=shape)
        return self._data.observation[rows], self.rewards(functions, *rows)

    def rewards(self, functions: np.ndarray, episode: np.ndarray, decision: np.ndarray) -> np.ndarray:
        """Rewards [K, ...] by K functions of the states of decisions [K, ...], none an episode's first."""
        rewards = [
            self._scales[number](self._data.state_rewards(self._rewards[number], *rows))
            for number, *rows in zip(functions, episode, decision, strict=True)
        ]
        return np.stack(rewards)
