"""Trials: a policy acts in many environments at once, episode after episode, and may remember.

Between trials only the environments are reset. What the policy keeps of earlier trials is its own
business: an in-context learner keeps everything, the random policy nothing.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from gymnasium.vector import VectorEnv

from agentic_ring.errors import ArgumentError


class TrialPolicy(Protocol):
    """What acts in a trial. E environments, O observation and A action dimensions."""

    def begin_trial(self) -> None:
        """All environments have been reset; the next call is ``act``."""
        ...

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Actions float32 [E, A] in [-1, 1] for observations float32 [E, O]."""
        ...

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Takes the rewards float32 [E] of the actions just given; ``last`` ends the trial."""
        ...


class RandomPolicy:
    """Actions uniform in [-1, 1], independent over steps and environments."""

    def __init__(self, num_environments: int, action_dim: int, seed: int):
        self._shape = (num_environments, action_dim)
        self._generator = np.random.default_rng(seed)

    def begin_trial(self) -> None:
        """Nothing to forget."""

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Actions float32 [E, A], whatever is observed."""
        return self._generator.uniform(-1.0, 1.0, self._shape).astype(np.float32)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Nothing to learn."""


def run_trials(
    policy: TrialPolicy,
    environments: VectorEnv,
    trials: int,
    on_step: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Rolls ``policy`` out for several trials, one after another, in all environments in lock-step.

    Args:
      policy: acts, and keeps what it wants of earlier trials.
      environments: from ``make_environments``: reset by hand, all episodes equally long.
      trials: episodes one after another in each environment.
      on_step: called with (trial, step), both from 0, after each step; for a progress bar.

    Returns:
      Undiscounted returns float64 [E, trials].

    Raises:
      ArgumentError: fewer than one trial; an action of the wrong shape, non-finite or outside
        [-1, 1]; or episodes of different lengths, which cannot run in lock-step.
    """
    if trials < 1:
        raise ArgumentError(f"trials is {trials}; it must be at least 1")
    returns = np.zeros((environments.num_envs, trials))
    for trial in range(trials):
        observation, _ = environments.reset(options={"trial": trial})
        policy.begin_trial()
        step, last = 0, False
        while not last:
            action = _checked_action(policy.act(observation), environments)
            observation, reward, terminated, truncated, _ = environments.step(action)
            ended = terminated | truncated
            last = bool(ended.all())
            if ended.any() and not last:
                raise ArgumentError(
                    f"{int(ended.sum())} of {ended.size} environments ended at step {step} of trial {trial}; "
                    "trials in lock-step need a task whose episodes are equally long"
                )
            returns[:, trial] += reward
            policy.receive(reward.astype(np.float32), last)
            if on_step is not None:
                on_step(trial, step)
            step += 1
    return returns


def _checked_action(action: np.ndarray, environments: VectorEnv) -> np.ndarray:
    expected = environments.action_space.shape
    if action.shape != expected:
        raise ArgumentError(
            f"the policy's actions have shape {action.shape}; [E, A] = {expected} is expected"
        )
    if not (np.abs(action) <= 1.0).all():  # false for NaN as well
        raise ArgumentError(
            f"the policy's actions reach from {action.min()} to {action.max()}; they must lie in [-1, 1]"
        )
    return action
