"""Returns of each trial in cue tasks, of trained models and of reference policies, kept in files.

Conditions of a trained model, which was trained on chains of n trials:

online        trials one after another, the last n in context, the current one included
likeliest     the same with the likeliest action instead of a sampled one
window_32     the same with the last 32 trials in context
no_rewards    online, but all rewards that the model receives are 0
no_context    each trial without context
nothing       the first of these trials, as many as behind stored contexts
right_pay, another_task, zeroed, shuffled
              each trial behind the same stored random trials; see ``contexts``
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.families import Family, Pay, Region
from agentic_ring.data.families.cue_task import CueTask, draw_cue_task
from agentic_ring.data.families.environments import make_cue_environments
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.scaling import Scaling
from agentic_ring.errors import DataError, UnknownNameError, check_at_least_one
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.inference.sampling import Sampling
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.model import Model, Params
from agentic_ring.rollouts.policies import RolloutPlan, TrialWindowPolicy, with_copies
from agentic_ring.rollouts.trials import Cohort, TrialPolicy, ZeroRewardPolicy, run_shown_trials
from evals.in_context.contexts import (
    STORED_PAYS,
    StoredContextPolicy,
    StoredPay,
    as_context,
    draw_stored_trials,
)
from evals.in_context.references import ThompsonPolicy, reference_policy

Condition = Literal["online", "likeliest", "window_32", "no_rewards", "no_context", "nothing"] | StoredPay
CONDITIONS: tuple[Condition, ...] = (*get_args(get_args(Condition)[0]), *STORED_PAYS)
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class CueRolloutConfig:
    """Tasks and trials of a rollout.

    Attributes:
      family: name of the family.
      cues: number of cues K of each task.
      region: where the goals lie.
      tasks: number of tasks E, which run in lock-step.
      first_seed: seed of the first task; the others have the next ones.
      trials: number of trials in a row.
      measured: number of trials behind a stored context, each with only that context.
      stored: number of stored trials in a context; fewer if it is shorter.
      pay: how decisions are paid.
      temperature: temperature of the mixture that actions are sampled from.
    """

    family: str
    cues: int
    region: Region = "seen"
    tasks: int = 32
    first_seed: int = 10_000
    trials: int = 128
    measured: int = 16
    stored: int = 112
    pay: Pay = "dense"
    temperature: float = 0.5

    def __post_init__(self) -> None:
        check_at_least_one(self, "tasks", "trials", "measured", "stored")

    def stored_before(self, trials: int) -> int:
        """Number of stored trials in a context of so many trials, the current one included."""
        return max(1, min(self.stored, trials - 1))

    def draw_tasks(self, family: Family) -> list[CueTask]:
        """Draws the tasks."""
        seeds = range(self.first_seed, self.first_seed + self.tasks)
        return [draw_cue_task(family, self.cues, seed, self.region) for seed in seeds]


@dataclass(frozen=True)
class TrainedArm:
    """A trained model.

    Attributes:
      model, params, mesh: the model, its weights, and the mesh that it was trained on.
      scaling: scaling of its training data.
      trials: number of trials n in its chains.
      told: whether the goal is observed: the learned oracle.
      hold: decisions for which an action is held, as in the training data.
    """

    model: Model[AgenticTransformerConfig]
    params: Params
    mesh: Mesh
    scaling: Scaling
    trials: int
    told: bool = False
    hold: int = 1

    def policy(self, mesh: Mesh, environments: int, decisions: int, sampling: Sampling) -> InContextPolicy:
        """A policy without context; arguments as for ``InContextPolicy``."""
        return InContextPolicy(
            self.model,
            self.params,
            mesh,
            self.scaling,
            None,
            environments,
            decisions,
            sampling=sampling,
            hold=self.hold,
        )


def arm_returns(
    arm: TrainedArm, config: CueRolloutConfig, condition: Condition, store: ExplorationStore
) -> np.ndarray:
    """Rolls out a trained model.

    Args:
      arm: the model.
      config: tasks and trials.
      condition: what the model has in context.
      store: explored trials of the family, for stored contexts.

    Returns:
      Returns float64 [E, trials]; [E, measured] for stored contexts and "nothing".

    Raises:
      ConfigError: the store is of another family, or too small for a context.
      UnknownNameError: there is no such condition.
    """
    if condition not in CONDITIONS:
        raise UnknownNameError("condition", condition, CONDITIONS)
    store.require_family(config.family)
    tasks = config.draw_tasks(store.family)
    trials = config.measured if condition in ("nothing", *STORED_PAYS) else config.trials
    window = {"window_32": min(32, arm.trials), "no_context": 1, "nothing": 1}.get(condition, arm.trials)
    plan = RolloutPlan.choose(arm.mesh, len(tasks), 0)
    share = len(tasks) // plan.policies
    temperature = 0.0 if condition == "likeliest" else config.temperature
    policy = arm.policy(
        plan.mesh,
        share,
        store.family.decisions * (1 if condition in STORED_PAYS else min(window, trials)),
        Sampling(temperature, seed=config.first_seed),
    )
    policies = with_copies(policy, plan.policies)
    parts = [tasks[first : first + share] for first in range(0, len(tasks), share)]
    acting: list[TrialPolicy] = []
    if condition in STORED_PAYS:
        stored = draw_stored_trials(store, tasks, config.stored_before(arm.trials), condition, config.pay)
        context = as_context(stored, store, tasks, arm.scaling)
        for number, each in enumerate(policies):
            each.start_over(context.rows(slice(number * share, (number + 1) * share)))
            acting.append(StoredContextPolicy(each))
    else:
        acting.extend(TrialWindowPolicy(each, window) for each in policies)
    if condition == "no_rewards":
        acting = [ZeroRewardPolicy(each) for each in acting]
    return _roll_out(acting, parts, config, trials, condition, arm.told)


def reference_returns(name: str, config: CueRolloutConfig, family: Family) -> np.ndarray:
    """Rolls out a reference policy by its name; see ``references``. Returns float64 [E, trials]."""
    environments = make_cue_environments(family, config.draw_tasks(family), config.pay)
    policy = reference_policy(name, environments, config.region, config.first_seed)
    label = f"{name}, K = {config.cues}, {config.region}"
    return run_shown_trials(label, [Cohort(policy, environments)], config.trials, family.decisions)


def thompson_returns(
    trials: int, config: CueRolloutConfig, condition: StoredPay | Literal["nothing"], store: ExplorationStore
) -> np.ndarray:
    """Rolls out Thompson sampling behind the stored trials that ``arm_returns`` shows to a model.

    It believes what they pay, and forgets its own trials.

    Args:
      trials: number of trials that the model was trained on.
      config: tasks and trials.
      condition: the pay of the stored trials, or "nothing": there are none.
      store: explored trials of the family.

    Returns:
      Returns float64 [E, measured].

    Raises:
      ConfigError: see ``check_reference`` and ``draw_stored_trials``.
    """
    environments = make_cue_environments(store.family, config.draw_tasks(store.family), config.pay)
    policy = reference_policy("thompson_1", environments, config.region, config.first_seed)
    assert isinstance(policy, ThompsonPolicy)
    if condition != "nothing":
        stored = draw_stored_trials(store, environments.tasks, config.stored_before(trials), condition)
        policy.read(stored, store)
    label = f"thompson, {condition}, K = {config.cues}, {config.region}"
    return run_shown_trials(label, [Cohort(policy, environments)], config.measured, store.family.decisions)


def _roll_out(
    policies: Sequence[TrialPolicy],
    parts: Sequence[Sequence[CueTask]],
    config: CueRolloutConfig,
    trials: int,
    condition: Condition,
    told: bool,
) -> np.ndarray:
    family = parts[0][0].family
    cohorts = [
        Cohort(policy, make_cue_environments(family, part, config.pay, told))
        for policy, part in zip(policies, parts, strict=True)
    ]
    label = f"{condition}, K = {config.cues}, {config.region}"
    return run_shown_trials(label, cohorts, trials, family.decisions)


def kept_returns(path: Path, config: CueRolloutConfig, roll_out: Callable[[], np.ndarray]) -> np.ndarray:
    """Reads returns from a file that an earlier call wrote; otherwise rolls out and writes it.

    Args:
      path: ``.npz`` file with ``returns`` [E, trials] and ``config``, the configuration as JSON.
      config: tasks and trials.
      roll_out: computes the returns.

    Raises:
      DataError: the file is damaged, or of another configuration.
    """
    described = json.dumps(asdict(config), sort_keys=True)
    if path.exists():
        return _read(path, described, config.tasks)
    returns = roll_out()
    with replacing(path) as beside, beside.open("wb") as file:
        np.savez(file, returns=returns, config=np.array(described))
    return returns


def _read(path: Path, described: str, tasks: int) -> np.ndarray:
    remedy = "delete the file, and the same command rolls out again"
    try:
        arrays = read_npz(path, _MOST_BYTES)
    except DataError as error:
        raise DataError(f"{path}: {error}; {remedy}") from error
    if set(arrays) != {"returns", "config"}:
        raise DataError(f"{path} holds {sorted(arrays)}; expected returns and config; {remedy}")
    if str(arrays["config"]) != described:
        raise DataError(f"{path} is of {arrays['config']}; expected {described}; {remedy}")
    returns = arrays["returns"]
    if returns.dtype != np.float64 or returns.ndim != 2 or len(returns) != tasks or not returns.size:
        raise DataError(
            f"{path}: returns is {returns.dtype} {list(returns.shape)}; expected float64 [{tasks}, trials]; "
            f"{remedy}"
        )
    if not np.isfinite(returns).all():
        raise DataError(f"{path} holds returns that are not finite; {remedy}")
    return returns
