"""Normalisation of observations, rewards and returns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.target_return import target_return
from agentic_ring.errors import DataError

MINIMUM_STD = 1e-3
"""Floor of an observation's standard deviation, which keeps constant entries near 0."""


@dataclass(frozen=True)
class TaskScale:
    """Scales of one task of a task family; fields as in ``Scaling``."""

    task: str
    reward_scale: float
    return_scale: float


@dataclass(frozen=True)
class Scaling:
    """Scales measured once on the training data, stored with the run, used in training and rollouts.

    Attributes:
      observation_mean, observation_std: one value per entry of the observation.
      reward_scale: divisor of a decision's reward (the number of its steps).
      return_scale: divisor of returns-to-go (the best return of the data).
      hidden_tasks: scales of each task of a task family; the common target of a task is scaled to 1.
    """

    observation_mean: tuple[float, ...]
    observation_std: tuple[float, ...]
    reward_scale: float
    return_scale: float
    hidden_tasks: tuple[TaskScale, ...] = ()

    def for_task(self, task: str) -> "Scaling":
        """Returns the scaling for one task of the family, or itself if there is no such task."""
        for scale in self.hidden_tasks:
            if scale.task == task:
                return replace(self, reward_scale=scale.reward_scale, return_scale=scale.return_scale)
        return self

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


def measure_family_scaling(
    store: TrajectoryStore, tasks: Sequence[str], action_repeat: int, target_quantile: float
) -> Scaling:
    """Measures the scaling of a task family, so that the size of returns does not reveal the task.

    Each task's target, a quantile of the returns of all episodes of a policy, is scaled to 1, and a decision
    that earns an equal share of the target has reward 1. The rest is ``measure_scaling`` of the first task.

    Raises:
      DataError: the target of a task is not positive.
    """
    decisions = -(-int(store.lengths.max()) // action_repeat)
    scales = []
    for task in tasks:
        target = target_return(store, task, target_quantile)
        if target <= 0:
            raise DataError(
                f"the {target_quantile} quantile of the returns in {task} is {target}, expected more than "
                f"0: {store.path} has no good trajectory for it. Collect with --tasks {task}, or omit it"
            )
        scales.append(TaskScale(task, target / decisions, target))
    scaling = measure_scaling(store, tasks[0], action_repeat)
    return replace(scaling, hidden_tasks=tuple(scales)).for_task(tasks[0])
