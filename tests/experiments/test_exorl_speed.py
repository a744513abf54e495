"""The speed of the main job, on synthetic chains and, where there are some, on stored trajectories."""

from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.store import store_path
from agentic_ring.data.tasks import parse_task
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import make_mesh
from agentic_ring.models.transformer_config import TransformerConfig
from experiments.exorl.presets import PRESETS
from experiments.exorl_speed import exorl_speed, synthetic_batch
from tests.data.synthetic import random_store

TASK = parse_task("cartpole_swingup")
PRESET = replace(
    PRESETS["demo"],
    transformer=TransformerConfig(width=16, layers=1, heads=2, ffn_width=16),
    trajectories=3,
    tokens_per_update=8 * 3 * 20 * 4,
    action_repeat={"cartpole": 50},
)


def test_synthetic_chains_have_the_places_of_a_chain():
    mesh = make_mesh()
    training = PRESET.training(20, mesh)
    batch = synthetic_batch(PRESET.model(TASK.domain, 20), training, 3, 20, mesh)
    steps = batch.steps
    assert batch.weight.shape == (training.batch_size, 64), "60 steps, padded to the ring of 8"
    place = np.asarray(steps.position)[0]
    assert sorted(place) == [-1] * 4 + list(range(60))
    known = place >= 0
    np.testing.assert_array_equal(np.asarray(steps.timestep)[0][known], place[known] % 20)
    np.testing.assert_array_equal(np.asarray(steps.trajectory)[0][known], place[known] // 20)
    np.testing.assert_array_equal(np.asarray(batch.weight)[0], place >= 40)
    assert np.asarray(steps.action).std() > 0.5
    assert not steps.position.sharding.is_fully_replicated


def test_a_time_that_is_not_positive_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="minutes is 0"):
        exorl_speed(PRESET, TASK, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_the_row_names_its_data_and_the_loss_falls(tmp_path, stored):
    path = store_path(tmp_path, "cartpole", "mix")
    if stored:
        path.parent.mkdir()
        random_store(path, [1000] * 6, algorithms=["td3"] * 6, action_repeat=50)
    row = exorl_speed(PRESET, TASK, 0.02, tmp_path)
    assert row["data"].startswith("store cartpole-mix.h5" if stored else "synthetic, as ")
    assert row["tokens_per_update"] == 8 * 64 * 4
    assert row["updates"] > 3
    assert row["tokens_per_second_low"] <= row["tokens_per_second"] <= row["tokens_per_second_high"]
    assert row["loss_last"] < row["loss_first"]
