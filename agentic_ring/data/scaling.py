"""What is measured once on the training data: scales of observations, rewards, returns; the target return."""

from dataclasses import dataclass

import numpy as np

from agentic_ring.data.store import TrajectoryStore

MINIMUM_STD = 1e-3
"""Floor of an observation's standard deviation, which keeps constant entries near 0."""


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


TARGET_QUANTILE = 0.95


def target_return(store: TrajectoryStore, task: str, quantile: float = TARGET_QUANTILE) -> float:
    """Returns a quantile of the returns in ``task`` of all trajectories in which a policy acted.

    Every trial aims at this return. It is chosen from the training data, never from results.
    """
    return float(np.quantile(store.returns(task)[store.learnable], quantile))
