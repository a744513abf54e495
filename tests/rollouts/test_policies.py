"""Devices and number of policies of a rollout, and the prompt before the first trial."""

from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.domains import parse_task
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.rollouts import policies
from agentic_ring.rollouts.policies import RolloutPlan, read_prompt
from experiments.exorl.pipeline import resolve
from experiments.exorl.presets import PRESETS
from tests.data.synthetic import TASK, random_store


def test_a_prompt_ascends_below_the_target_and_aims_at_it(tmp_path):
    path = random_store(tmp_path / "s.h5", [10] * 20)
    preset = replace(PRESETS["demo"], trials=1, prompt_trajectories=3)
    mesh = make_mesh(MeshShape(ring=8))
    config = resolve(preset, parse_task(f"cartpole_{TASK}"), path, mesh, "leaders", seed=0)
    with TrajectoryStore.open(path) as store:
        prompt = read_prompt(store, config, ring=8)
        assert config.target == np.quantile(store.returns(TASK), 0.95)
    assert prompt.position.shape == (1, 32)  # 3 x 10 steps, padded to the ring
    np.testing.assert_array_equal(prompt.position[0], [*range(30), -1, -1])
    starts = prompt.return_to_go[0, [0, 10, 20]] * config.scaling.return_scale
    np.testing.assert_allclose(starts, config.target, rtol=1e-6)
    earned = prompt.reward[0, :30].reshape(3, 10).sum(axis=1) * config.scaling.reward_scale
    assert (np.diff(earned) > 0).all()
    assert earned.max() <= config.target


@pytest.mark.parametrize(
    ("cores", "prompt_tokens", "environments", "expected"),
    [
        (2, 0, 16, ({"data": 1, "ring": 1}, 2)),
        (2, 3000, 16, ({"data": 1, "ring": 1}, 2)),
        (2, 30_000, 16, ({"data": 1, "ring": 2}, 1)),
        (4, 0, 12, ({"data": 3, "ring": 1}, 2)),
        (4, 0, 10, ({"data": 1, "ring": 1}, 2)),
        (1, 0, 3, ({"data": 1, "ring": 1}, 1)),
    ],
)
def test_simulated_devices_leave_a_core_to_the_environments_unless_the_prompt_is_long(
    monkeypatch, cores, prompt_tokens, environments, expected
):
    monkeypatch.setattr(policies, "usable_cores", lambda: cores)
    plan = RolloutPlan.choose(make_mesh(MeshShape(ring=8)), environments, prompt_tokens)
    sizes, num_policies = expected
    assert {name: plan.mesh.shape[name] for name in sizes} == sizes
    assert plan.mesh.size == sizes["data"] * sizes["ring"]
    assert plan.policies == num_policies
