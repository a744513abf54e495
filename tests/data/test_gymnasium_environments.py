import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from agentic_ring.data.domains import all_tasks, flatten_observation, load_environment, parse_task
from agentic_ring.errors import UnknownNameError

MODULE = "agentic_ring.data.gymnasium_environments"


@pytest.mark.parametrize("name", ["jaco_reach_top_left", "walker_run_backward"])
def test_registered_environment_gives_the_tasks_own_steps(name):
    environment = gymnasium.make(f"{MODULE}:agentic_ring/{name}-v0", seed=3)
    direct = load_environment(parse_task(name), seed=3)
    domain = parse_task(name).domain
    assert environment.observation_space.shape == (domain.observation_dim,)
    assert environment.action_space == gymnasium.spaces.Box(-1, 1, (domain.action_dim,), np.float64)
    observation, _ = environment.reset()
    np.testing.assert_array_equal(observation, flatten_observation(direct.reset().observation))
    action = np.full(domain.action_dim, 0.5)
    for step in range(1, domain.episode_steps + 1):
        observation, reward, terminated, truncated, _ = environment.step(action)
        expected = direct.step(action)
        np.testing.assert_array_equal(observation, flatten_observation(expected.observation))
        assert reward == expected.reward
        assert not terminated
        assert truncated == (step == domain.episode_steps)


def test_seed_fixes_the_initial_state():
    environment = gymnasium.make(f"{MODULE}:agentic_ring/point_mass_maze_reach_bottom_right-v0")
    first, again, other = (environment.reset(seed=seed)[0] for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_every_task_is_registered_beside_shimmys():
    gymnasium.make(f"{MODULE}:agentic_ring/cartpole_swingup-v0").close()
    assert {f"agentic_ring/{name}-v0" for name in all_tasks()} <= set(gymnasium.registry)
    assert "dm_control/walker-run-v0" in gymnasium.registry
    with pytest.raises(UnknownNameError, match="jaco_reach_middle"):
        gymnasium.make("agentic_ring/cartpole_swingup-v0", task="jaco_reach_middle")


def test_registering_loads_no_simulator():
    code = f"import sys, {MODULE}; sys.exit('dm_control.mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
