"""Returns of each trial of trained models in cue tasks, kept in files.

Conditions of a model that was trained on chains of n trials:

online        trials one after another, the last n in context, the current one included
likeliest     the same with the likeliest action instead of a sampled one
window_32     the same with the last 32 trials in context
no_rewards    online, but all rewards that the model receives are 0
no_context    each trial without context
nothing       the first of these trials, as many as behind stored contexts
random        uniform actions, without a model

Each trial behind the same stored trials of random actions, with right or corrupted rewards:

right_pay     the task's rewards for these trials
another_task  those of another task, with other goals
zeroed        0
shuffled      the right rewards, each trial's given to another trial of the context

Random trials are chosen without regard to any goal, so that only their rewards tell the task.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.hidden_tasks.cue_chains import CueChainConfig, read_trials
from agentic_ring.data.hidden_tasks.cue_task import CueTask, draw_cue_task
from agentic_ring.data.hidden_tasks.environments import CueEnvironments
from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.family import Family, RewardKind
from agentic_ring.data.store import Scaling
from agentic_ring.errors import ConfigError, DataError, UnknownNameError, check_at_least_one
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz
from agentic_ring.files.read_errors import remedy_for
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.inference.sampling import Sampling
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params
from agentic_ring.rollouts.policies import RolloutPlan, TrialWindowPolicy
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, TrialPolicy, ZeroRewardPolicy, run_trials
from experiments.hidden_tasks.verdict import CORRUPTED, CUES, NOTHING, ONLINE, ORACLE, RIGHT_REWARDS, Case

RANDOM = "random"
LONGEST = "n128"
"""The variant with all controls."""
STORED = (RIGHT_REWARDS, *CORRUPTED)
"""Conditions behind stored trials."""
ONLINE_CONTROLS = ("no_context", "no_rewards", "window_32", "likeliest")
CONDITIONS = (ONLINE, *ONLINE_CONTROLS, NOTHING, RANDOM, *STORED)
_CONTEXT = 100
"""Purpose of random numbers, other than those of ``CueTask``."""
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class RolloutConfig:
    """Size of the rollouts of a model."""

    tasks: int = 32
    """Number of tasks E, which run in lock-step."""
    first_seed: int = 10_000
    """Seed of the first task; the others have the next ones."""
    trials: int = 128
    """Number of trials in a row."""
    measured: int = 16
    """Number of trials behind a stored context, each with only that context."""
    stored: int = 112
    """Number of stored trials in a context; fewer if it is shorter."""
    temperature: float = 0.5
    """Temperature of the mixture that actions are sampled from."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "tasks", "trials", "measured", "stored")


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: its weights, the mesh, scaling and chains of its training."""

    model: Model[AgenticTransformerConfig]
    params: Params
    mesh: Mesh
    scaling: Scaling
    chains: CueChainConfig
    _made: dict[tuple[int, int, int, Sampling], InContextPolicy] = field(init=False, default_factory=dict)

    def policies(self, tasks: int, decisions: int, hold: int, sampling: Sampling) -> list[InContextPolicy]:
        """Policies without a context, for equal shares of the tasks; alike ones are compiled once."""
        plan = RolloutPlan.choose(self.mesh, tasks, 0)
        share, key = tasks // plan.policies, (tasks, decisions, hold, sampling)
        if key not in self._made:
            model, params, scaling = self.model, self.params, self.scaling
            self._made[key] = InContextPolicy(
                model, params, plan.mesh, scaling, None, share, decisions, sampling=sampling, hold=hold
            )
        return [self._made[key].fresh_copy(number * share) for number in range(plan.policies)]


def variant_cases(variant: str, family: Family) -> list[Case]:
    """The rollouts of a variant, the main one first, and random actions in the tasks of the oracle."""
    cases = [Case(variant, cues) for cues in (CUES, 4, 1)]
    if variant == LONGEST:
        cases += [Case(variant, CUES, condition) for condition in (*STORED, NOTHING, *ONLINE_CONTROLS)]
        if family.held_out:
            cases.append(Case(variant, CUES, region="unseen"))
    if variant == ORACLE:
        cases.append(Case(variant, CUES, RANDOM))
    return cases


def case_returns(
    trained: TrainedModel, config: RolloutConfig, case: Case, store: ExplorationStore
) -> np.ndarray:
    """Rolls out a trained model in a case; ``store`` holds explored trials for stored contexts.

    Returns:
      Returns float64 [E, trials]; [E, measured] for stored contexts and "nothing".

    Raises:
      ConfigError: the store is of another family, or too small for a context; or there is no other task whose
        rewards could be taken.
      UnknownNameError: there is no such condition.
    """
    if case.condition not in CONDITIONS:
        raise UnknownNameError("condition", case.condition, CONDITIONS)
    store.require_family(trained.chains.family)
    family = store.family
    seeds = range(config.first_seed, config.first_seed + config.tasks)
    tasks = [draw_cue_task(family, case.cues, seed, case.region) for seed in seeds]
    trials = config.measured if case.condition in (NOTHING, *STORED) else config.trials
    acting: Sequence[TrialPolicy]
    if case.condition == RANDOM:
        acting = [RandomPolicy(len(tasks), family.action_dim, config.first_seed)]
    else:
        acting = _policies(trained, config, case.condition, tasks, trials, store)
    share = len(tasks) // len(acting)
    kind, shows_goal = trained.chains.reward_kind, trained.chains.shows_goal
    cohorts = [
        Cohort(policy, CueEnvironments(tasks[number * share :][:share], kind, shows_goal))
        for number, policy in enumerate(acting)
    ]
    label = f"{case.condition}, K = {case.cues}, {case.region}"
    return run_trials(label, cohorts, trials, family.decisions)


def _policies(
    trained: TrainedModel,
    config: RolloutConfig,
    condition: str,
    tasks: Sequence[CueTask],
    trials: int,
    store: ExplorationStore,
) -> Sequence[TrialPolicy]:
    """The policies of a model, which act in equal shares of the tasks."""
    context = trained.chains.trials
    ones = dict.fromkeys(("no_context", NOTHING, *STORED), 1)
    window = {"window_32": min(32, context), **ones}.get(condition, context)
    sampling = Sampling(0.0 if condition == "likeliest" else config.temperature, seed=config.first_seed)
    decisions = store.family.decisions * min(window, trials)
    policies = trained.policies(len(tasks), decisions, store.family.hold, sampling)
    if condition in STORED:
        stored = max(1, min(config.stored, context - 1))
        prompt = stored_context(store, tasks, stored, condition, trained.scaling, trained.chains.reward_kind)
        share = len(tasks) // len(policies)
        for number, each in enumerate(policies):
            each.start_over(prompt.rows(slice(number * share, (number + 1) * share)))
    windows = [TrialWindowPolicy(each, window) for each in policies]
    return [ZeroRewardPolicy(each) for each in windows] if condition == "no_rewards" else windows


def stored_context(
    store: ExplorationStore,
    tasks: Sequence[CueTask],
    trials: int,
    condition: str,
    scaling: Scaling,
    reward_kind: RewardKind = "dense",
) -> ChainSteps:
    """Draws random stored trials for each task as its context; only rewards depend on ``condition``.

    Args:
      tasks: E tasks, all with the same number of cues.
      trials: number of trials n of each task.
      condition: one of ``STORED``; "another_task" takes the rewards of the next of ``tasks``.

    Returns:
      Steps [E, n x D].

    Raises:
      ConfigError: the store has fewer trials, or there is no other task whose rewards could be taken.
    """
    family, environments = store.family, len(tasks)
    another = condition == "another_task"
    if trials > store.num_trials or environments < 1 + another:
        raise ConfigError(
            f"a context of {trials} trials of {environments} tasks is requested, but {store.path} has only "
            f"{store.num_trials}, and rewards of another task need 2 tasks; explore or roll out more"
        )
    others = [*tasks[1:], tasks[0]] if another else tasks
    numbers = np.arange(trials * family.decisions)
    contexts = []
    for task, rewarding in zip(tasks, others, strict=True):
        random = np.random.default_rng((task.seed, _CONTEXT))
        drawn = random.choice(store.num_trials, trials, replace=False)
        cue = random.integers(len(task.goals), size=trials)
        coins = random.random((trials, family.decisions))
        reward = store.rewards(drawn, rewarding.goals[cue], reward_kind)
        if reward_kind == "coin":
            reward = (coins < reward).astype(np.float64)
        if condition == "zeroed":
            reward = np.zeros_like(reward)
        if condition == "shuffled":
            reward = reward[random.permutation(trials)]
        observed = np.pad(task.codes[cue], ((0, 0), (0, family.goal_dim)))
        contexts.append(read_trials(store, scaling, drawn, reward, observed, numbers))
    steps: dict[str, Any] = {name: np.stack([each[name] for each in contexts]) for name in contexts[0]}
    steps["position"] = np.tile(numbers.astype(np.int32), (environments, 1))
    return ChainSteps(**steps)


def returns_path(directory: Path, case: Case) -> Path:
    """File of the returns of a case in the folder of its cell."""
    return directory / "returns" / f"cues{case.cues}-{case.condition}-{case.region}.npz"


def kept_returns(path: Path, tasks: int, roll_out: Callable[[], np.ndarray]) -> np.ndarray:
    """Reads returns as ``read_returns`` does; where there is no file, rolls out and writes it first."""
    if not path.exists():
        returns = roll_out()
        with replacing(path) as beside, beside.open("wb") as file:
            np.savez(file, returns=returns)
    return read_returns(path, tasks)


def read_returns(path: Path, tasks: int) -> np.ndarray:
    """Reads the returns [E, trials] of so many tasks; a ``DataError`` if the file is missing or damaged."""
    try:
        returns = read_npz(path, _MOST_BYTES).get("returns", np.zeros(0))
        expected = returns.dtype == np.float64 and returns.ndim == 2 and len(returns) == tasks
        if not expected or not returns.size or not np.isfinite(returns).all():
            found = f"{returns.dtype} {list(returns.shape)}"
            raise DataError(f"its returns are {found}; expected finite float64 [{tasks}, trials]")
    except DataError as error:
        remedy = "delete it and its cell's results.json, and the same command rolls out again"
        raise DataError(f"{path}: {error}; {remedy_for(error, remedy)}") from error
    return returns
