"""Trials in a hidden task: online, with nothing in context, and behind stored trajectories.

online       n trials one after another, all of them in context
no_context   the same trials, each with an empty context
right, ...   one trial behind a context of ``hidden_contexts``
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.task_family import make_family_sampler
from agentic_ring.data.tasks import Task
from agentic_ring.inference import InContextPolicy
from agentic_ring.models.model import Model, Params
from agentic_ring.run import EvaluationConfig, RunConfig
from evals.dmc_returns import roll_out
from evals.in_context.contexts import CONTEXTS, Context, StoredContexts
from evals.rollouts.policies import RolloutPlan, plan_of, with_twins
from evals.rollouts.trials import TrialPolicy

PROMPT_SEED_OFFSET = 1
"""Contexts are other chains than those of training: the sampler's seed moves on by this."""

Condition = Literal["online", "no_context"] | Context
CONDITIONS: tuple[Condition, ...] = ("online", "no_context", *CONTEXTS)


class ForgetfulPolicy:
    """Acts as ``policy`` does with nothing in its context, in every trial anew."""

    def __init__(self, policy: InContextPolicy):
        self._policy = policy

    def begin_trial(self) -> None:
        """Forgets all earlier trials."""
        self._policy.start_over(None)
        self._policy.begin_trial()

    def act(self, observation: np.ndarray) -> ArrayLike:
        """Actions float32 [E, A] for observations float32 [E, O]."""
        return self._policy.act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Takes the rewards float32 [E]."""
        self._policy.receive(reward, last)


class UnpaidPolicy:
    """Acts as ``policy`` does if it never learns of a reward; returns-to-go stay at the target."""

    def __init__(self, policy: TrialPolicy):
        self._policy = policy

    def begin_trial(self) -> None:
        """All environments have been reset."""
        self._policy.begin_trial()

    def act(self, observation: np.ndarray) -> ArrayLike:
        """Actions float32 [E, A] for observations float32 [E, O]."""
        return self._policy.act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Passes 0 on in place of the rewards float32 [E]."""
        self._policy.receive(np.zeros_like(reward), last)


class HiddenRollouts:
    """Rolls a trained model out in one of the hidden tasks, which it is not told.

    Args:
      config: of the run.
      task: the truth.
      model, params, mesh: as for ``InContextPolicy``.
      draws: contexts of stored trajectories of each kind; so many share the environments out evenly.
    """

    def __init__(self, config: RunConfig, task: Task, model: Model, params: Params, mesh: Mesh, draws: int):
        self._config = config
        self._task = task
        self._model, self._params, self._mesh = model, params, mesh
        self._draws = draws

    def returns(self, condition: Condition) -> np.ndarray:
        """Undiscounted returns float64 [E, trials]; one trial behind stored trajectories."""
        match condition:
            case "online" | "no_context":
                evaluation = self._config.evaluation
                plan = self._plan(evaluation)
                policies = with_twins(self._policy(evaluation, plan), plan.policies)
                acting = policies if condition == "online" else [ForgetfulPolicy(each) for each in policies]
                return self._roll_out(acting, condition, evaluation)
            case context:
                return self._behind(context)

    def _behind(self, context: Context) -> np.ndarray:
        chains, scaling, evaluation = self._config.chains, self._config.scaling, self._config.evaluation
        share = evaluation.environments // self._draws
        part = replace(evaluation, environments=share, trials=1, prompt_trajectories=chains.trajectories - 1)
        plan = self._plan(part)
        policy = self._policy(part, plan)
        parts = []
        with TrajectoryStore.open(self._config.store) as store:
            sampler = make_family_sampler(
                store, replace(chains, seed=chains.seed + PROMPT_SEED_OFFSET), scaling
            )
            contexts = StoredContexts(store, chains, sampler, scaling, plan.mesh.shape["ring"])
            for number in range(self._draws):
                policy.start_over(contexts.steps(self._task.name, context, number))
                policies = with_twins(policy, plan.policies)
                acting = [UnpaidPolicy(each) for each in policies] if context == "zeroed" else policies
                part = replace(part, first_seed=evaluation.first_seed + number * share)
                parts.append(self._roll_out(acting, context, part))
        return np.concatenate(parts)

    def _plan(self, evaluation: EvaluationConfig) -> RolloutPlan:
        return plan_of(replace(self._config, evaluation=evaluation), self._mesh)

    def _policy(self, evaluation: EvaluationConfig, plan: RolloutPlan) -> InContextPolicy:
        scaling = self._config.scaling.for_task(self._task.name)
        return InContextPolicy(
            self._model,
            self._params,
            plan.mesh,
            scaling,
            scaling.return_scale,
            evaluation.environments // plan.policies,
            self._config.decisions * evaluation.trials,
        )

    def _roll_out(
        self, policies: Sequence[TrialPolicy], condition: Condition, evaluation: EvaluationConfig
    ) -> np.ndarray:
        name = f"{condition} policy, {self._task.full_name}"
        return roll_out(policies, name, self._task, self._config.chains.action_repeat, evaluation)[0]
