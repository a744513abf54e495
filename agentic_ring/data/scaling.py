"""The numbers that bring observations, rewards and returns to order one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.target_return import target_return
from agentic_ring.errors import DataError

MINIMUM_STD = 1e-3
"""Floor of an observation's standard deviation: entries that never move are left near 0."""


@dataclass(frozen=True)
class TaskScale:
    """How rewards and returns of one of several hidden tasks are scaled; fields as in ``Scaling``."""

    task: str
    reward_scale: float
    return_scale: float


@dataclass(frozen=True)
class Scaling:
    """Measured once on the training data, kept with the run, used alike in training and rollouts.

    Attributes:
      observation_mean, observation_std: one value for each entry of the observation.
      reward_scale: a step's reward is divided by this (the steps that one decision lasts).
      return_scale: returns-to-go are divided by this (the best return of the data).
      hidden_tasks: the same for each of several hidden tasks, whose common target is scaled to 1.
    """

    observation_mean: tuple[float, ...]
    observation_std: tuple[float, ...]
    reward_scale: float
    return_scale: float
    hidden_tasks: tuple[TaskScale, ...] = ()

    def for_task(self, task: str) -> "Scaling":
        """The scaling of one of the hidden tasks; itself where there are none."""
        for scale in self.hidden_tasks:
            if scale.task == task:
                return replace(self, reward_scale=scale.reward_scale, return_scale=scale.return_scale)
        return self

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


def measure_family_scaling(
    store: TrajectoryStore, tasks: Sequence[str], action_repeat: int, target_quantile: float
) -> Scaling:
    """The scaling of tasks that are not to be told apart by the size of their returns.

    Each task's target, a quantile of the returns of all that a policy acted in, becomes 1, and a decision
    that earns its even share of the target has reward 1. All else is ``measure_scaling`` of the first task.

    Raises:
      DataError: no trajectory earns anything in one of the tasks.
    """
    decisions = -(-int(store.lengths.max()) // action_repeat)
    scales = []
    for task in tasks:
        target = target_return(store, task, target_quantile)
        if target <= 0:
            raise DataError(
                f"the {target_quantile} quantile of the returns in {task} is {target}: nothing in "
                f"{store.path} is good at it. Collect data with --tasks that name it, or leave the task out"
            )
        scales.append(TaskScale(task, target / decisions, target))
    scaling = measure_scaling(store, tasks[0], action_repeat)
    return replace(scaling, hidden_tasks=tuple(scales)).for_task(tasks[0])
