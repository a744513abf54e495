"""The folder of a finished run without a prompt: real trials of a fresh model in cartpole."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from agentic_ring.data.tasks import parse_task
from agentic_ring.files.run_folder import Stages, write_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.metrics_log import MetricsLog
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import init_state
from evals.rollouts.returns import evaluate_returns
from experiments.exorl.pipeline import resolve, write_report
from experiments.exorl.presets import PRESETS
from tests.data.synthetic import random_store


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """Two trials of 20 decisions in each of two environments; an action is held for 50 steps."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    store = random_store(directory.parent / "s.h5", [1000] * 6, action_repeat=50)
    preset = replace(
        PRESETS["demo"],
        transformer=TransformerConfig(width=16, layers=2, heads=2, ffn_width=16),
        trajectories=2,
        trials=2,
        action_repeat={"cartpole": 50},
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
    metrics.write(1, {"loss": 1.0})
    metrics.close()
    report = evaluate_returns(config, model, state.params, mesh)
    write_report(config, report, report.figures(), Stages(), directory)
    return directory
