"""A run's folder as the main job leaves it, but for the training: trials of a fresh model in cartpole."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring.data.domains import parse_task
from agentic_ring.files.run_folder import Stages, write_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.rollouts.returns import ReturnReport, evaluate_returns
from agentic_ring.run import RunConfig
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import init_state
from experiments.exorl.pipeline import resolve, write_report
from experiments.exorl.presets import PRESETS
from tests.data.synthetic import random_store

DECISIONS = 20


@dataclass(frozen=True)
class FinishedRun:
    directory: Path
    config: RunConfig
    params: Params
    report: ReturnReport


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> FinishedRun:
    """Three trials in each of two environments after a prompt of two stored trajectories."""
    directory = tmp_path_factory.mktemp("runs") / "small <run> & co"
    algorithms = ["td3"] * 8 + ["ou"] * 4
    store = random_store(directory.parent / "s.h5", [1000] * 12, algorithms=algorithms, action_repeat=50)
    preset = replace(
        PRESETS["demo"],
        # Heads of 4: narrower than the chain is long, so that attention is added up in two parts.
        transformer=TransformerConfig(width=16, layers=2, heads=4, kv_heads=2, ffn_width=16),
        trajectories=5,
        trials=3,
        prompt_trajectories=2,
        action_repeat={"cartpole": 1000 // DECISIONS},
    )
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
    write_report(config, report, report.figures(paper=123.45), Stages(), directory)
    return FinishedRun(directory, config, jax.tree.map(np.asarray, state.params), report)
