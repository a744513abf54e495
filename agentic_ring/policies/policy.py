"""A trained Agentic Transformer as an object that acts, trial after trial, in one or many environments."""

from pathlib import Path

import jax
import numpy as np
from numpy.typing import ArrayLike

from agentic_ring.data.tasks import parse_task
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model, Params
from agentic_ring.policies.policy_folder import load_params, policy_folder
from agentic_ring.run import RunConfig, load_config


class Policy:
    """Acts in E environments that step together; every trial stays in context until ``reset``.

    An action is held for ``action_repeat`` control steps, as in training: ``act`` is called at every control
    step and returns the same action until the decision is over.

    Args:
      config: configuration of the run.
      params: parameters of one of its checkpoints.
      target: return that every trial is conditioned on; None takes that of the run.

    Raises:
      ConfigError: the run's trials come after a prompt of stored trajectories.
      ArgumentError: the target is not finite.

    Attributes:
      task: full name of the task, such as ``walker_run``.
      action_repeat: control steps for which an action is held.
      trials: number of episodes in a row that the policy takes after a reset, as in its run.
      target: see above.
    """

    def __init__(self, config: RunConfig, params: Params, target: float | None = None):
        if config.evaluation.prompt_trajectories:
            raise ConfigError(
                f"the policy acts after a prompt of {config.evaluation.prompt_trajectories} stored "
                "trajectories, which are not part of it; roll its run out with evals/dmc_returns.py --run"
            )
        self.task = config.task
        self.action_repeat = config.chains.action_repeat
        self.trials = config.evaluation.trials
        self.target = config.target if target is None else float(target)
        if not np.isfinite(self.target):
            raise ArgumentError(f"target is {self.target}; give a finite return, such as {config.target:.1f}")
        self._episode_steps = parse_task(config.task).domain.episode_steps
        self._config = config
        self._params = params
        self._mesh = make_mesh(MeshShape(), jax.devices()[:1])
        self._in_context: InContextPolicy | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets all trials; the next ``act`` starts the first one, in any number of environments."""
        self._rows: tuple[int, ...] | None = None
        self._trial = self._decision = self._held = 0
        self._awaits_reward = False

    def act(self, observation: ArrayLike) -> np.ndarray:
        """Returns actions float32 [E, A] in [-1, 1], or [A] for one environment.

        Args:
          observation: flat observations of the task [E, O], or [O]; E stays the same until a reset.

        Raises:
          ArgumentError: the shape is wrong or a value is not finite; the reward of the last action was not
            received; or all trials have ended, or the steps of an episode are over.
        """
        observed = self._checked_observation(observation)
        if self._held == 0:
            rows = np.atleast_2d(observed)
            policy = self._policy_for(len(rows))
            if self._decision == 0:
                policy.begin_trial()
            self._action = np.asarray(policy.act(rows)).reshape(*observed.shape[:-1], -1)
            self._reward = np.zeros(len(rows))
        self._rows, self._awaits_reward = observed.shape[:-1], True
        return self._action.copy()

    def receive(self, reward: ArrayLike, done: ArrayLike) -> None:
        """Receives the rewards [E] of the last actions, or one reward; ``done`` ends the trial.

        Args:
          reward: reward of one control step, float [E], or a number for one environment.
          done: whether the episodes ended with this step, terminated or truncated: bool or bool [E].

        Raises:
          ArgumentError: no action was asked for; the shape is wrong or a value is not finite; or only some
            of the environments ended.
        """
        if not self._awaits_reward or self._in_context is None:
            raise ArgumentError("a reward was given before an action; call act first")
        earned, ended = np.asarray(reward, np.float64), np.asarray(done, bool)
        if earned.shape != self._rows or not np.isfinite(earned).all():
            raise ArgumentError(f"reward is {_brief(earned)}; expected finite numbers of shape {self._rows}")
        if ended.shape not in ((), self._rows) or ended.any() != ended.all():
            raise ArgumentError(
                f"done is {_brief(ended)}; expected one value, or {self._rows} equal ones: environments in "
                "which a policy acts together end together, as those of one task do"
            )
        self._awaits_reward = False
        self._reward += np.atleast_1d(earned)
        self._held += 1
        last = bool(ended.all())
        if last or self._held == self.action_repeat:
            self._in_context.receive(self._reward.astype(np.float32), last)
            self._held, self._decision = 0, self._decision + 1
        if last:
            self._trial, self._decision = self._trial + 1, 0

    def _policy_for(self, environments: int) -> InContextPolicy:
        """The policy of the current trials; a new one, or one without trials, for the first action."""
        if self._in_context is None or self._in_context.num_environments != environments:
            self._in_context = InContextPolicy(
                Model(self._config.model),
                self._params,
                self._mesh,
                self._config.scaling,
                self.target,
                environments,
                self._config.decisions * self.trials,
            )
        elif self._rows is None:
            self._in_context.discard_trials()
        return self._in_context

    def _checked_observation(self, observation: ArrayLike) -> np.ndarray:
        if self._awaits_reward:
            raise ArgumentError("the reward of the last action is missing; call receive after every action")
        if self._trial == self.trials:
            raise ArgumentError(f"all {self.trials} trials have ended; call reset to forget them")
        if self._decision * self.action_repeat + self._held == self._episode_steps:
            raise ArgumentError(
                f"an episode of {self.task} ends after {self._episode_steps} steps, but none of them was "
                "done; give `terminated | truncated` to receive, and let vector environments reset in the "
                "same step (AutoresetMode.SAME_STEP)"
            )
        observed = np.asarray(observation, np.float32)
        width = self._config.model.observation_dim
        fits = observed.ndim in (1, 2) and observed.size > 0 and observed.shape[-1] == width
        if not fits or observed.shape[:-1] != (self._rows if self._rows is not None else observed.shape[:-1]):
            expected = f"[{width}] or [E, {width}]" if self._rows is None else str([*self._rows, width])
            raise ArgumentError(
                f"observation is {_brief(observed)}; {self.task} needs shape {expected}, flat as "
                f"agentic_ring/{self.task}-v0 gives them"
            )
        if not np.isfinite(observed).all():
            raise ArgumentError("observation has values that are not finite; reset the environment")
        return observed


def load_policy(policy: str | Path, target: float | None = None) -> Policy:
    """Loads a trained Agentic Transformer for use, on JAX's first device.

    Args:
      policy: name of a shipped policy such as ``walker_run``, folder of a run or of an exported policy, or
        a policy's ``model.safetensors``.
      target: return that every trial is conditioned on; None takes that of the run.

    Raises:
      UnknownNameError: there is no such policy; the message lists those that are shipped.
      DataError: the configuration or the weights are damaged.
      CheckpointError: the run has no checkpoint, or the weights do not fit the configuration.
      ConfigError: the policy acts after a prompt of stored trajectories.
    """
    folder = policy_folder(policy)
    config = load_config(folder)
    params, _ = load_params(folder, config, make_mesh(MeshShape(), jax.devices()[:1]))
    return Policy(config, params, target)


def _brief(array: np.ndarray) -> str:
    """A scalar, or the shape of an array and its first values."""
    return str(array) if array.ndim == 0 else f"{list(array.shape)}: {array.ravel()[:4].tolist()}..."
