"""Trained Agentic Transformers that act, trial after trial, in one or many environments."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from agentic_ring.data.domains import parse_task
from agentic_ring.data.rewards.tasks import RewardOfFeatures, task_reward
from agentic_ring.data.rewards.user_reward import UserReward
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_chains import AS_IT_IS
from agentic_ring.data.told_decisions import ToldDecisions, decision_rewards
from agentic_ring.data.trajectories import Trajectory
from agentic_ring.errors import ArgumentError, ConfigError, DataError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.told_policy import TEMPERATURE, ToldPolicy, told_prompt
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.models.model import Model, Params
from agentic_ring.run import RunConfig, ToldRunConfig


class ActingPolicy(ABC):
    """Acts in E environments that step together; every trial stays in context until ``reset``.

    An action is held for ``action_repeat`` control steps, as in training: ``act`` is called at every control
    step and returns the same action until the decision is over.

    Attributes:
      task: full name of the run's task, such as ``walker_run``.
      action_repeat: control steps for which an action is held.
      trials: number of episodes in a row that the policy takes after a reset, as in its run.
    """

    def __init__(self, config: RunConfig | ToldRunConfig, params: Params):
        self.task = config.task
        self.action_repeat = config.chains.action_repeat
        self.trials = config.evaluation.trials
        self._domain = parse_task(config.task).domain
        self._decisions = self._domain.decisions(self.action_repeat)
        self._scaling = config.scaling
        self._model = Model(config.model)
        self._params = params
        self._mesh = make_mesh(MeshShape(), jax.devices()[:1])
        self._in_context: InContextPolicy | ToldPolicy | None = None
        self.reset()

    @abstractmethod
    def _new_policy(self, environments: int) -> InContextPolicy | ToldPolicy:
        """A policy of this number of environments, without trials."""

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
        """Receives the rewards [E] of the last actions, or one reward for one environment.

        Args:
          reward: rewards of one control step.
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

    def _policy_for(self, environments: int) -> InContextPolicy | ToldPolicy:
        """The policy of the current trials; a new one, or one without trials, for the first action."""
        if self._in_context is None or self._in_context.num_environments != environments:
            self._in_context = self._new_policy(environments)
        elif self._rows is None:
            self._in_context.discard_trials()
        return self._in_context

    def _checked_observation(self, observation: ArrayLike) -> np.ndarray:
        if self._awaits_reward:
            raise ArgumentError("the reward of the last action is missing; call receive after every action")
        if self._trial == self.trials:
            raise ArgumentError(f"all {self.trials} trials have ended; call reset to forget them")
        if self._decision * self.action_repeat + self._held == self._domain.episode_steps:
            raise ArgumentError(
                f"an episode of {self.task} ends after {self._domain.episode_steps} steps, but none of them "
                "was done; give `terminated | truncated` to receive, and let vector environments reset in "
                f"the same step, as gymnasium.make_vec('agentic_ring/{self.task}-v0', E) does"
            )
        observed = np.asarray(observation, np.float32)
        width = self._domain.observation_dim
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


class Policy(ActingPolicy):
    """An ``ActingPolicy`` of one task, whose trials aim at a return.

    Raises:
      ConfigError: the run's trials come after a prompt of stored trajectories.
      ArgumentError: the target is not finite.

    Attributes:
      target: return that every trial is conditioned on; by default that of the run.
    """

    def __init__(self, config: RunConfig, params: Params, target: float | None = None):
        if config.evaluation.prompt_trajectories:
            raise ConfigError(
                f"the policy acts after a prompt of {config.evaluation.prompt_trajectories} stored "
                "trajectories, which are not part of it; roll its run out with evals/dmc_returns.py --run"
            )
        self.target = config.target if target is None else float(target)
        if not np.isfinite(self.target):
            raise ArgumentError(f"target is {self.target}; give a finite return, such as {config.target:.1f}")
        super().__init__(config, params)

    def _new_policy(self, environments: int) -> InContextPolicy:
        sizes = environments, self._decisions * self.trials
        return InContextPolicy(self._model, self._params, self._mesh, self._scaling, self.target, *sizes)


class TellablePolicy(ActingPolicy):
    """An ``ActingPolicy`` that trajectories tell what to do; it acts without a context until ``tell``.

    Actions are drawn by their probability; each draw is another one, also after a reset.

    Args:
      kept: stored trajectories to relabel; None reads those of the run's store.
    """

    def __init__(self, config: ToldRunConfig, params: Params, kept: ToldDecisions | None = None):
        self._config, self._kept = config, kept
        self._prompt: ChainSteps | None = None
        self._reward_scale = AS_IT_IS
        super().__init__(config, params)

    def tell(
        self,
        trajectories: Sequence[Trajectory] | None = None,
        *,
        task: str | None = None,
        reward: RewardOfFeatures | None = None,
        count: int | None = None,
        seed: int = 0,
    ) -> None:
        """Makes trajectories the context in all environments, in place of all earlier ones and of all trials.

        Args:
          trajectories: whole episodes at the control step, whose rewards tell what to do. They may be of
            another policy; of each decision, the action of its first control step is shown.
          task, reward: in place of trajectories, what stored ones of the run are relabelled with: the full
            name of a task of its domain, or a function of features, see ``data.rewards.features``.
          count: number of stored trajectories; None takes as many as chains of training have.
          seed: draws the stored trajectories.

        Raises:
          ArgumentError: not one of trajectories, task and reward is given; there are none, more than chains
            of training have, or fewer in the store; they are no whole episodes; or the reward fails.
          UnknownNameError: the domain has no such task, or no feature that the reward reads.
          DataError: the store cannot be read, or the rewards are the same in all decisions.
        """
        match trajectories, task, reward:
            case given, None, None if given is not None:
                told = self._decisions_of(given)
            case None, str(name), None:
                told = self._relabelled(task_reward(parse_task(name, self._domain)), count, seed)
            case None, None, function if function is not None:
                asked = UserReward(getattr(function, "__name__", "reward"), function)
                told = self._relabelled(asked, count, seed)
            case _:
                raise ArgumentError("tell takes one of trajectories, task and reward; give it one of them")
        observation, action, rewards = told
        chains = self._config.chains
        if not np.ptp(rewards) and not chains.goals:  # where goals are rare, trajectories need not meet any
            raise DataError(
                f"the reward is {rewards.flat[0]:g} in all {rewards.size} decisions of the trajectories, so "
                "they tell nothing; give a reward that differs among what they reach"
            )
        self._reward_scale = chains.scale(rewards)
        scaled = self._reward_scale(rewards)
        self._prompt = told_prompt(chains, observation[None], action[None], scaled[None])
        if isinstance(self._in_context, ToldPolicy):
            self._in_context.reward_scale = self._reward_scale
            self._in_context.start_over(self._prompt)
        self.reset()

    def _new_policy(self, environments: int) -> ToldPolicy:
        sizes = environments, self.trials, self._decisions, self._config.chains.spans
        model = self._model, self._params, self._mesh, self._scaling
        return ToldPolicy(
            *(*model, *sizes, self._prompt, Sampling(TEMPERATURE)),
            reward_scale=self._reward_scale,
            shown=self._config.chains.shown,
        )

    def _relabelled(
        self, reward: RewardOfFeatures, count: int | None, seed: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Observations [n, D, O], actions [n, D, A] and rewards [n, D] of stored trajectories."""
        chains = self._config.chains
        number = chains.trajectories if count is None else count
        self._check_number(number)
        if self._kept is None:
            with TrajectoryStore.open(self._config.store) as store:
                drawn = self._drawn(seed, number, store.num_episodes, str(store.path))
                told = ToldDecisions.of_store(store, self._scaling, self.action_repeat, drawn)
        else:
            told = self._kept.chosen(self._drawn(seed, number, len(self._kept.action), "the policy"))
        return told.observation, told.action, told.rewards(reward)

    @staticmethod
    def _drawn(seed: int, number: int, available: int, source: str) -> np.ndarray:
        if number > available:
            raise ArgumentError(
                f"count is {number}, but {source} holds {available} trajectories; give a lower one"
            )
        return np.random.default_rng(seed).permutation(available)[:number]

    def _decisions_of(self, trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As ``_relabelled``, of trajectories that are given."""
        domain, steps = self._domain, self._domain.episode_steps
        expected = (steps, domain.observation_dim), (steps, domain.action_dim)
        for number, each in enumerate(trajectories):
            shapes = isinstance(each, Trajectory) and (each.observation.shape, each.action.shape)
            if shapes != expected:
                found = f"has shapes {shapes}" if shapes else f"is a {type(each).__name__}"
                raise ArgumentError(
                    f"trajectory {number} {found}; expected agentic_ring.data.trajectories.Trajectory of "
                    f"whole episodes of {domain.name}, with a row for each control step: shapes {expected}"
                )
        self._check_number(len(trajectories))
        observation, action, rewards = (
            np.stack([getattr(each, name) for each in trajectories]).astype(np.float32)
            for name in ("observation", "action", "reward")
        )
        first = np.s_[:, :: self.action_repeat]
        scaled = self._scaling.observation(observation[first])
        return scaled, action[first], decision_rewards(rewards, self.action_repeat)

    def _check_number(self, number: int) -> None:
        most = self._config.chains.trajectories
        if not 1 <= number <= most:
            raise ArgumentError(
                f"the number of trajectories is {number}, but the model was trained on chains of {most}; "
                f"give 1 to {most}"
            )


def _brief(array: np.ndarray) -> str:
    """A scalar, or the shape of an array and its first values."""
    return str(array) if array.ndim == 0 else f"{list(array.shape)}: {array.ravel()[:4].tolist()}..."
