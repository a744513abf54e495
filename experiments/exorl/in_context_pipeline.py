"""The stages of a hidden-task run, but for training, which is ``pipeline.train_on_store``."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainConfig
from agentic_ring.data.scaling import measure_family_scaling
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import Domain, parse_task, task_named
from agentic_ring.errors import ConfigError
from agentic_ring.files import replacing
from agentic_ring.mesh import MeshShape
from agentic_ring.models.model import Model, Params
from agentic_ring.run import EvaluationConfig, RunConfig
from agentic_ring.run_folder import Stages
from agentic_ring.training.metrics import read_metrics
from evals.common.plots import plot_loss
from evals.common.results import Results, write_results
from evals.common.rows import write_rows
from evals.in_context.task_rollouts import CONDITIONS, Condition, HiddenRollouts
from evals.in_context.trial_curves import plot_hidden
from evals.in_context.verdict import HiddenReport
from experiments.exorl.in_context_presets import TOP_FRACTION
from experiments.exorl.pipeline import decisions_of
from experiments.exorl.presets import Preset

ENVIRONMENTS = 32
DRAWS = 16
"""Contexts of stored trajectories of each kind, which share the environments out."""
OPENING = 10
"""Decisions at a trial's start, see ``ChainConfig``."""
ACTION_MODES = 4


def resolve_hidden(
    preset: Preset,
    preset_name: str,
    domain: Domain,
    tasks: Sequence[str],
    store_path: Path,
    mesh: Mesh,
    seed: int,
) -> RunConfig:
    """The whole configuration of a run whose chains draw one of ``tasks`` each.

    Raises:
      UnknownNameError, ConfigError: a task that the domain lacks, or one that is named twice.
      DataError: nothing in the data is good at one of them.
    """
    first, *_ = [task_named(domain, name) for name in tasks]
    if len(set(tasks)) < len(tasks):
        raise ConfigError(f"hidden tasks {', '.join(tasks)}: one is named twice")
    evaluation = EvaluationConfig(trials=preset.trials, environments=ENVIRONMENTS)
    with TrajectoryStore.open(store_path) as store:
        action_repeat, longest = decisions_of(store, preset.action_repeat.get(domain.name, 1))
        scaling = measure_family_scaling(store, tasks, action_repeat, evaluation.target_quantile)
    model = preset.model(domain, max_timestep=longest)
    return RunConfig(
        task=first.full_name,
        preset=preset_name,
        store=str(store_path),
        mesh=MeshShape(**mesh.shape),
        chains=ChainConfig(
            task=first.name,
            trajectories=preset.trajectories,
            action_repeat=action_repeat,
            top_fraction=TOP_FRACTION.get(domain.name, 0.1),
            opening=OPENING,
            hidden_tasks=tuple(tasks),
            seed=seed,
        ),
        scaling=scaling,
        model=replace(model, return_conditioning=False, fused_reward=True, action_modes=ACTION_MODES),
        training=preset.training(
            preset.trajectories * longest, mesh.shape["data"] * mesh.shape["fsdp"], seed
        ),
        evaluation=evaluation,
        target=scaling.return_scale,
    )


def hidden_returns(
    config: RunConfig, model: Model, params: Params, mesh: Mesh, directory: Path
) -> HiddenReport:
    """Every condition in every task; what ``returns/`` in the run's folder holds is not rolled out again."""
    domain = parse_task(config.task).domain
    found: dict[str, dict[Condition, np.ndarray]] = {}
    for name in config.chains.hidden_tasks:
        rollouts = HiddenRollouts(config, task_named(domain, name), model, params, mesh, DRAWS)
        found[name] = {}
        for condition in CONDITIONS:
            path = directory / "returns" / f"{name}-{condition}.npy"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                with replacing(path) as beside, beside.open("wb") as file:
                    np.save(file, rollouts.returns(condition))
            found[name][condition] = np.load(path, allow_pickle=False)
    targets = {name: config.scaling.for_task(name).return_scale for name in config.chains.hidden_tasks}
    return HiddenReport(found, targets, config.evaluation.first_seed, DRAWS)


def write_hidden_report(config: RunConfig, report: HiddenReport, stages: Stages, directory: Path) -> None:
    """Writes ``results.json``, ``trials.csv`` and the plots."""
    results = Results.of_this_process(asdict(config), stages.seconds, report.figures())
    write_results(directory / "results.json", results)
    write_rows(directory / "trials.csv", report.rows())
    domain = parse_task(config.task).domain.name
    plot_hidden(directory / "hidden_task.png", f"{domain}: the task is hidden", report)
    plot_loss(directory / "loss.png", f"{domain}, hidden task", read_metrics(directory / "metrics.jsonl"))
