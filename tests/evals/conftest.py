"""A finished run whose trials come after stored trajectories."""

from dataclasses import replace

import pytest

from agentic_ring.models.transformer_config import TransformerConfig
from experiments.exorl.presets import PRESETS
from tests.data.synthetic import random_store
from tests.evals.finished_run import FinishedRun, write_finished_run

DECISIONS = 20


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> FinishedRun:
    """Three trials of cartpole after a prompt of two stored trajectories, 20 decisions each."""
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
    return write_finished_run(directory, preset, store, paper=123.45)
