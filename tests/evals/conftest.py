"""A run's folder as the main job leaves it, but for the training: trials of a fresh model in cartpole."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring.data.domains import parse_task
from agentic_ring.data.told_chains import ToldChainConfig
from agentic_ring.files.run_folder import Stages, write_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.rollouts import told_returns
from agentic_ring.rollouts.returns import ReturnReport, evaluate_returns
from agentic_ring.run import RunConfig, ToldEvaluation, ToldRunConfig
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import init_state
from evals import dmc_returns
from experiments.exorl import told_pipeline
from experiments.exorl.pipeline import resolve, write_report
from experiments.exorl.presets import PRESETS
from experiments.exorl.told_presets import TOLD_PRESETS
from tests.data.synthetic import random_store

DECISIONS = 20
REWARDS = """
def right(features):
    return 1.0 * (features["cart_x"] > 0)

def nowhere(features):
    return features["cart_x"] > 1e9

def headless(features):
    return features["head"]
"""


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
    params = write_fresh(directory, config)
    metrics = MetricsLog(directory / "metrics.jsonl", 0)
    for step in range(1, 5):
        metrics.write(step, {"loss": 1 / step})
    metrics.close()
    report = evaluate_returns(config, Model(config.model), params, mesh)
    write_report(config, report, report.figures(paper=123.45), Stages(), directory)
    return FinishedRun(directory, config, jax.tree.map(np.asarray, params), report)


def write_fresh(directory: Path, config: RunConfig | ToldRunConfig) -> Params:
    """Writes a run's configuration and checkpoint 4, of a fresh model."""
    write_config(directory, config)
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    optimizer = make_optimizer(config.training.optimizer, config.training.steps)
    state = init_state(Model(config.model), optimizer, 0, mesh, config.model.transformer.rules)
    checkpoints = Checkpoints(directory / "checkpoints")
    checkpoints.save(4, state, {"batch": 4}, loss=0.5)
    checkpoints.close()
    return state.params


@pytest.fixture(scope="session")
def told_run(tmp_path_factory) -> Path:
    """Folder of a run of conditioning by context, but for the training and the evaluation."""
    directory = tmp_path_factory.mktemp("runs") / "told"
    store = random_store(directory.parent / "s.h5", [1000] * 12, action_repeat=40)
    preset = replace(
        TOLD_PRESETS["demo"],
        transformer=TransformerConfig(width=16, layers=1, heads=2, ffn_width=16),
        chains=ToldChainConfig(trajectories=4, decisions=8, groups=2),
        rewards=20,
        action_repeat={"cartpole": 40},
    )
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    config = told_pipeline.resolve(preset, parse_task("cartpole_swingup"), store, mesh, 0, None)
    write_fresh(directory, replace(config, evaluation=ToldEvaluation((0, 4), trials=2, environments=2)))
    return directory


@pytest.fixture(scope="session")
def told_again(told_run) -> Path:
    """What the evaluation of ``told_run`` on a user's reward leaves; without processes for environments."""
    directory = told_run.with_name("again")
    directory.mkdir()
    file = directory / "mine.py"
    file.write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(told_returns, "usable_cores", lambda: 1)
        dmc_returns.main(told_run, reward=f"{file}:right", output=directory)
    return directory
