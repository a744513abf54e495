"""The rollout loop: a policy acts in many environments at once, for several trials (episodes) in a row.

Only the environments are reset between trials. What a policy keeps of earlier trials is up to the policy:
an in-context learner keeps everything, the random policy nothing.

Environments may be divided into cohorts that are stepped alternately: while the environments of one cohort
are stepped, the policy of another may still compute its actions.

    cohort 0   step   act ........   step   act ........        step: in this process, on one core
    cohort 1          step   act ........   step   act ....     act: on the devices of the policy
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike

from agentic_ring.errors import ArgumentError
from agentic_ring.terminal.progress import progress


class TrialPolicy(Protocol):
    """A policy that is rolled out. E environments, O observation and A action dimensions."""

    def begin_trial(self) -> None:
        """Called when all environments have been reset; the next call is ``act``."""
        ...

    def act(self, observation: np.ndarray) -> ArrayLike:
        """Actions float32 [E, A] in [-1, 1] for observations float32 [E, O].

        They may be a ``jax.Array`` that is still being computed; the loop waits for it when it is needed.
        """
        ...

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Receives the rewards float32 [E] of the last actions; ``last`` ends the trial."""
        ...


class RandomPolicy:
    """A ``TrialPolicy`` of uniform actions in [-1, 1], independent over steps and environments."""

    def __init__(self, num_environments: int, action_dim: int, seed: int):
        self._shape = (num_environments, action_dim)
        self._generator = np.random.default_rng(seed)

    def begin_trial(self) -> None:
        pass

    def act(self, observation: np.ndarray) -> np.ndarray:
        return self._generator.uniform(-1.0, 1.0, self._shape).astype(np.float32)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        pass


Wrapped = TypeVar("Wrapped", bound=TrialPolicy)


class PolicyWrapper(Generic[Wrapped]):
    """Acts as ``policy`` does; a ``TrialPolicy`` whose methods pass on."""

    def __init__(self, policy: Wrapped):
        self._policy = policy

    def begin_trial(self) -> None:
        self._policy.begin_trial()

    def act(self, observation: np.ndarray) -> ArrayLike:
        return self._policy.act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        self._policy.receive(reward, last)


class ZeroRewardPolicy(PolicyWrapper[TrialPolicy]):
    """Acts as ``policy`` does if all rewards are 0, so returns-to-go stay at the target."""

    def receive(self, reward: np.ndarray, last: bool) -> None:
        super().receive(np.zeros_like(reward), last)


class Cohort:
    """Environments that step together, and the policy that acts in all of them.

    The environments do not reset themselves, and all episodes are equally long; see ``make_environments``.
    """

    def __init__(self, policy: TrialPolicy, environments: VectorEnv):
        self._policy = policy
        self._environments = environments
        self._trial = self._step = -1
        self._action: ArrayLike

    def begin(self, trial: int) -> None:
        """Starts a trial in all environments and requests the first actions."""
        self._trial, self._step = trial, -1
        observation, _ = self._environments.reset(options={"trial": trial})
        self._policy.begin_trial()
        self._action = self._policy.act(observation)

    def step(self) -> tuple[np.ndarray, bool]:
        """Executes the requested actions and requests the next ones; raises as ``run_trials``.

        Returns:
          Rewards float64 [E], and whether the trial has ended.
        """
        self._step += 1
        action, expected = np.asarray(self._action), self._environments.action_space.shape
        if action.shape != expected or not (np.abs(action) <= 1.0).all():  # false for NaN as well
            raise ArgumentError(
                f"the policy's actions have shape {action.shape} and range from {action.min()} to "
                f"{action.max()}; [E, A] = {expected} in [-1, 1] is expected"
            )
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


def run_trials(label: str, cohorts: Sequence[Cohort], trials: int, decisions: int) -> np.ndarray:
    """Rolls out several trials in a row in all environments of cohorts that are stepped alternately.

    Args:
      label: text of the progress bar, which also shows the mean return of the last whole trial.
      decisions: length of a trial, for the progress bar.

    Returns:
      Undiscounted returns float64 [E, trials], with the environments of all cohorts concatenated.

    Raises:
      ArgumentError: fewer than one trial; an action of the wrong shape, non-finite or outside
        [-1, 1]; or episodes of different lengths, which cannot run in lock-step.
    """
    if trials < 1:
        raise ArgumentError(f"trials is {trials}; it must be at least 1")
    returns, mean = [], None
    with progress(label, trials * decisions) as advance:
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
                        f"{sum(ends)} of {len(ends)} cohorts ended at step {step} of trial {trial}; trials "
                        "in lock-step need a task whose episodes are equally long"
                    )
                step += 1
                mean = float(np.mean(total)) if last else mean
                advance(trial * decisions + step, f"trial {trial + 1}", last_return=mean)
            returns.append(total)
    return np.stack(returns, axis=1)
