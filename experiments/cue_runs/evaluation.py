"""Which rollouts each arm needs, and the returns of all arms."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.families import family_named
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.models.model import Model, Params
from agentic_ring.terminal.progress import say
from evals.in_context.learning_curves import CONTROLS, EXACT_CONTROLS
from evals.in_context.recorded_trials import FILE_NAME, record_trials, write_recorded_trials
from evals.in_context.references import check_reference
from evals.in_context.rollouts import (
    Condition,
    TrainedArm,
    arm_returns,
    kept_returns,
    reference_returns,
    thompson_returns,
)
from evals.in_context.verdict import ARMS, CUES, ORACLE, Case, Returns
from experiments.common.cells import RESULTS_FILE
from experiments.cue_runs.arms import ArmConfig

RANDOM, TOLD, THOMPSON = "random", "told", "thompson"
"""Conditions of ``Case`` without a model; Thompson sampling remembers as many trials as the arm."""
LONGEST = "n128"
"""The arm with all controls."""


def arm_cases(config: ArmConfig) -> list[Case]:
    """The rollouts of an arm, the main one first, and the references in the same tasks."""
    arm, family = config.arm, family_named(config.family)
    cases = [Case(arm, cues) for cues in sorted(config.cues, reverse=True)]
    if arm == LONGEST:
        cases += [Case(arm, CUES, condition) for condition in (*CONTROLS, *config.online_controls)]
        if family.held_out:
            cases.append(Case(arm, CUES, region="unseen"))
    if arm == ORACLE:
        cases.append(Case(arm, CUES, RANDOM))
    if arm in (*ARMS, ORACLE):
        name = TOLD if arm == ORACLE else THOMPSON
        try:
            check_reference(name, family, config.evaluation.pay)
            cases.append(Case(arm, CUES, name))
            if arm == LONGEST:
                cases += [Case(arm, CUES, condition) for condition in EXACT_CONTROLS]
        except ConfigError as error:
            say(f"{arm} is rolled out without {name}: {error}")
    return cases


def trained_arm(config: ArmConfig, params: Params, mesh: Mesh) -> TrainedArm:
    """The trained model of an arm, for rollouts."""
    chains, hold = config.chains, family_named(config.family).hold
    return TrainedArm(Model(config.model), params, mesh, config.scaling, chains.trials, chains.told, hold)


def roll_out_cases(config: ArmConfig, params: Params, mesh: Mesh, directory: Path) -> dict[Case, np.ndarray]:
    """Returns [tasks, trials] of every case of an arm; those in the folder ``returns/`` are kept."""
    arm = trained_arm(config, params, mesh)
    found = {}
    with ExplorationStore.open(config.store) as store:
        for case in arm_cases(config):
            rollout = config.rollout(case.cues, case.region)
            if case.condition in (RANDOM, TOLD, THOMPSON):
                name = f"{THOMPSON}_{arm.trials}" if case.condition == THOMPSON else case.condition
                compute = partial(reference_returns, name, rollout, store.family)
            elif case.condition in EXACT_CONTROLS:
                stored_pay = cast(Any, EXACT_CONTROLS[case.condition])
                compute = partial(thompson_returns, arm.trials, rollout, stored_pay, store)
            else:
                compute = partial(arm_returns, arm, rollout, cast(Condition, case.condition), store)
            found[case] = kept_returns(returns_path(directory, case), rollout, compute)
    return found


def record(config: ArmConfig, params: Params, mesh: Mesh, directory: Path) -> None:
    """Records trials of the main rollout's first tasks for the report; a recording that is there is kept."""
    path = directory / FILE_NAME
    if not path.exists():
        arm = trained_arm(config, params, mesh)
        recorded = record_trials(arm, config.evaluation, family_named(config.family))
        write_recorded_trials(path, recorded)


def returns_path(directory: Path, case: Case) -> Path:
    """File of the returns of a case in the folder of its cell."""
    return directory / "returns" / f"cues{case.cues}-{case.condition}-{case.region}.npz"


def all_returns(cells: Mapping[Any, ArmConfig], output: Path) -> Returns:
    """Returns [seeds, tasks, trials] of every case of finished ``cells``, as their processes wrote them.

    Raises:
      DataError: a file is missing or damaged.
    """
    found: dict[Case, list[np.ndarray]] = {}
    for cell, config in cells.items():
        for case in arm_cases(config):
            path = returns_path(cell.folder(output), case)
            kept = kept_returns(path, config.rollout(case.cues, case.region), partial(_missing, path))
            found.setdefault(case, []).append(kept)
    return {case: np.stack(each) for case, each in found.items()}


def _missing(path: Path) -> np.ndarray:
    raise DataError(f"{path} does not exist; delete {path.parents[1] / RESULTS_FILE} to roll out again")
