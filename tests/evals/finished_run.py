"""A run's folder as the main job leaves it, but for the training: trials of a fresh model in cartpole."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from agentic_ring.data.domains import parse_task
from agentic_ring.files.run_folder import Stages, write_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model, Params
from agentic_ring.rollouts.returns import ReturnReport, evaluate_returns
from agentic_ring.run import RunConfig
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import init_state
from experiments.exorl.pipeline import resolve, write_report
from experiments.exorl.presets import Preset


@dataclass(frozen=True)
class FinishedRun:
    directory: Path
    config: RunConfig
    params: Params
    report: ReturnReport


def write_finished_run(
    directory: Path, preset: Preset, store: Path, paper: float | None = None
) -> FinishedRun:
    """Writes the folder; the trials of each of two environments are rolled out."""
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    config = resolve(preset, parse_task("cartpole_swingup"), store, mesh, "leaders", seed=0)
    config = replace(config, evaluation=replace(config.evaluation, environments=2))
    write_config(directory, config)
    model = Model(config.model)
    optimizer = make_optimizer(config.training.optimizer, config.training.steps)
    state = init_state(model, optimizer, 0, mesh, config.model.transformer.rules)
    checkpoints = Checkpoints(directory / "checkpoints")
    checkpoints.save(4, state, {"batch": 4}, loss=0.5)
    checkpoints.close()
    metrics = MetricsLog(directory / "metrics.jsonl", 0)
    for step in range(1, 5):
        metrics.write(step, {"loss": 1 / step})
    metrics.close()
    report = evaluate_returns(config, model, state.params, mesh)
    write_report(config, report, report.figures(paper=paper), Stages(), directory)
    return FinishedRun(directory, config, jax.tree.map(np.asarray, state.params), report)
