"""What stands in the context before the first trial."""

from dataclasses import replace

import numpy as np

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import parse_task
from agentic_ring.mesh import MeshShape, make_mesh
from evals.dmc_returns import read_prompt
from experiments.pipeline import resolve
from experiments.presets import PRESETS
from tests.data.synthetic import TASK, random_store


def test_a_prompt_ascends_below_the_target_and_aims_at_it(tmp_path):
    path = random_store(tmp_path / "s.h5", [10] * 20)
    preset = replace(PRESETS["demo"], trials=1, prompt_trajectories=3)
    mesh = make_mesh(MeshShape(ring=8))
    config = resolve(preset, "demo", parse_task(f"cartpole_{TASK}"), path, mesh, "last", seed=0)
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
