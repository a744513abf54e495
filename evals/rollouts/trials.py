"""Trials: a policy acts in many environments at once, episode after episode, and may remember.

Between trials only the environments are reset. What the policy keeps of earlier trials is its own
business: an in-context learner keeps everything, the random policy nothing.

Environments may be shared out over cohorts, which take turns: while one cohort's environments are
stepped, another's policy may still work out what to do.

    cohort 0   step   act ........   step   act ........        step: here, on one core
    cohort 1          step   act ........   step   act ....     act: wherever the policy computes
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike

from agentic_ring.errors import ArgumentError


class TrialPolicy(Protocol):
    """What acts in a trial. E environments, O observation and A action dimensions."""

    def begin_trial(self) -> None:
        """All environments have been reset; the next call is ``act``."""
        ...

    def act(self, observation: np.ndarray) -> ArrayLike:
        """Actions float32 [E, A] in [-1, 1] for observations float32 [E, O].

        They may be a ``jax.Array`` that is not there yet; it is waited for when it is needed.
        """
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


class Cohort:
    """Environments that step together, and the policy that acts in them.

    Args:
      policy: acts, and keeps what it wants of earlier trials.
      environments: from ``make_environments``: reset by hand, all episodes equally long.
    """

    def __init__(self, policy: TrialPolicy, environments: VectorEnv):
        self._policy = policy
        self._environments = environments
        self._trial = self._step = -1
        self._action: ArrayLike

    def begin(self, trial: int) -> None:
        """Starts a trial in all environments, and asks for the first actions."""
        self._trial, self._step = trial, -1
        observation, _ = self._environments.reset(options={"trial": trial})
        self._policy.begin_trial()
        self._action = self._policy.act(observation)

    def step(self) -> tuple[np.ndarray, bool]:
        """Takes the actions that were asked for, and asks for the next ones.

        Returns:
          Rewards float64 [E], and whether the trial has ended.

        Raises:
          ArgumentError: as for ``run_trials``.
        """
        self._step += 1
        action = _checked_action(np.asarray(self._action), self._environments)
        observation, reward, terminated, truncated, _ = self._environments.step(action)
        ended = terminated | truncated
        last = bool(ended.all())
        if ended.any() and not last:
            raise ArgumentError(
                f"{int(ended.sum())} of {ended.size} environments ended at step {self._step} of trial "
                f"{self._trial}; trials in lock-step need a task whose episodes are equally long"
            )
        self._policy.receive(reward.astype(np.float32), last)
        if not last:
            self._action = self._policy.act(observation)
        return reward, last


def run_trials(
    cohorts: Sequence[Cohort], trials: int, on_step: Callable[[int, int], None] | None = None
) -> np.ndarray:
    """Rolls out several trials, one after another, in all environments in lock-step.

    Args:
      cohorts: that take turns.
      trials: episodes one after another in each environment.
      on_step: called with (trial, step), both from 0, after each step; for a progress bar.

    Returns:
      Undiscounted returns float64 [E, trials] of the environments of all cohorts, one after another.

    Raises:
      ArgumentError: fewer than one trial; an action of the wrong shape, non-finite or outside
        [-1, 1]; or episodes of different lengths, which cannot run in lock-step.
    """
    if trials < 1:
        raise ArgumentError(f"trials is {trials}; it must be at least 1")
    returns = []
    for trial in range(trials):
        for cohort in cohorts:
            cohort.begin(trial)
        total, step, last = 0.0, 0, False
        while not last:
            rewards, ends = zip(*(cohort.step() for cohort in cohorts), strict=True)
            total = total + np.concatenate(rewards)
            last = any(ends)
            if last and not all(ends):
                raise ArgumentError(
                    f"{sum(ends)} of {len(ends)} cohorts ended at step {step} of trial {trial}; trials in "
                    "lock-step need a task whose episodes are equally long"
                )
            if on_step is not None:
                on_step(trial, step)
            step += 1
        returns.append(total)
    return np.stack(returns, axis=1)


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
