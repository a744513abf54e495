"""The folder of a finished run without stored trajectories in context, as a policy needs it."""

from dataclasses import replace
from pathlib import Path

import pytest

from agentic_ring.models.transformer_config import TransformerConfig
from experiments.exorl.presets import PRESETS
from tests.data.synthetic import random_store
from tests.evals.finished_run import write_finished_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """Two trials of 20 decisions in each of two environments; an action is held for 50 steps."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    store = random_store(directory.parent / "s.h5", [1000] * 6, action_repeat=50)
    preset = replace(
        PRESETS["demo"],
        transformer=TransformerConfig(width=16, layers=1, heads=2, ffn_width=16),
        trajectories=2,
        trials=2,
        action_repeat={"cartpole": 50},
    )
    return write_finished_run(directory, preset, store).directory
