"""The numbers that bring observations, rewards and returns to order one."""

from dataclasses import dataclass

import numpy as np

from agentic_ring.data.store import TrajectoryStore

MINIMUM_STD = 1e-3
"""Floor of an observation's standard deviation: entries that never move are left near 0."""


@dataclass(frozen=True)
class Scaling:
    """Measured once on the training data, kept with the run, used alike in training and rollouts.

    Attributes:
      observation_mean, observation_std: one value for each entry of the observation.
      reward_scale: a step's reward is divided by this (the steps that one decision lasts).
      return_scale: returns-to-go are divided by this (the best return of the data).
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
    """Reads every observation of the store once; sums run in float64."""
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
