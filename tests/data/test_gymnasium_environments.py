"""Registered environments, and those of trials: dm_control's own steps, in ExoRL's order."""

import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from agentic_ring.data.domains import all_tasks, flatten_observation, load_environment, parse_task
from agentic_ring.data.gymnasium_environments import make_environment, make_environments
from agentic_ring.errors import ArgumentError, ConfigError
from tests.commands import run_python

MODULE = "agentic_ring.data.gymnasium_environments"
CARTPOLE, WALKER = parse_task("cartpole_swingup"), parse_task("walker_run")


@pytest.mark.parametrize(
    "name", ["jaco_reach_top_left", "walker_run_backward", "walker_run", "cheetah_run", "cartpole_swingup"]
)
def test_registered_environment_gives_the_tasks_own_steps(name):
    environment = gymnasium.make(f"{MODULE}:agentic_ring/{name}-v0", seed=3)
    direct = load_environment(parse_task(name), seed=3)
    domain, actions = parse_task(name).domain, environment.action_space
    assert direct.control_timestep() == pytest.approx(domain.control_timestep_seconds)
    assert actions == gymnasium.spaces.Box(-1, 1, (domain.action_dim,), np.float64)
    observation, _ = environment.reset()
    np.testing.assert_array_equal(observation, flatten_observation(direct.reset().observation))
    for step in range(1, domain.episode_steps + 1):
        observation, reward, terminated, truncated, _ = environment.step(actions.high / 2)
        expected = direct.step(actions.high / 2)
        assert observation in environment.observation_space
        np.testing.assert_array_equal(observation, flatten_observation(expected.observation))
        assert (reward, terminated) == (expected.reward, False)
        assert truncated == expected.last() == (step == domain.episode_steps)


def test_every_task_is_registered():
    environment = gymnasium.make("agentic_ring/cartpole_swingup-v0")
    first, again, other = (environment.reset(seed=seed)[0] for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert {f"agentic_ring/{name}-v0" for name in all_tasks()} <= set(gymnasium.registry)


def test_registering_loads_no_simulator():
    code = f"import sys, {MODULE}; sys.exit('dm_control.mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_environments_without_a_seed_differ_and_repeat_with_one():
    name = f"{MODULE}:agentic_ring/point_mass_maze_reach_top_left-v0"
    vectors = [gymnasium.make_vec(name, 2) for _ in range(2)]
    first, second = (vector.reset()[0] for vector in vectors)
    assert len(np.unique([*first, *second], axis=0)) == 4
    assert vectors[0].metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.SAME_STEP
    first, second = (vector.reset(seed=5)[0] for vector in vectors)
    np.testing.assert_array_equal(first, second)
    assert (first[0] != first[1]).any()


def test_graphics_that_are_off_or_missing_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"render_mode is 'rgb_array'.*MUJOCO_GL=egl"):
        gymnasium.make(f"{MODULE}:agentic_ring/walker_run-v0", render_mode="rgb_array")
    for command in ("collect --domain cartpole --output", "explore --family reacher --data"):
        name, *flags = command.split()
        ended = run_python("-m", f"data_prep.{name}", *flags, tmp_path, env=os.environ | {"MUJOCO_GL": "glx"})
        assert ended.returncode == 1
        assert ended.stderr.splitlines()[-1].startswith("error: MuJoCo does not start with MUJOCO_GL=glx (")
        assert "Traceback" not in ended.stderr


def test_trials_take_place_in_shimmys_registered_environment():
    ours = make_environment(WALKER, seed=0, action_repeat=1)
    theirs = gymnasium.make("dm_control/walker-run-v0", environment_kwargs={"flat_observation": True})
    observation, _ = ours.reset()
    same, _ = theirs.reset(seed=int(np.random.SeedSequence((0, 0)).generate_state(1)[0]))
    for action in np.random.default_rng(0).uniform(-1, 1, (10, 6)).astype(np.float32):
        assert observation.dtype == np.float32
        np.testing.assert_array_equal(observation, same["observations"].astype(np.float32))
        observation, reward, *_ = ours.step(action)
        same, same_reward, *_ = theirs.step(action.astype(np.float64))
        assert reward == same_reward


def test_action_repeat_sums_rewards_and_stops_at_the_episodes_end():
    single, held = (make_environment(CARTPOLE, seed=1, action_repeat=repeat) for repeat in (1, 3))
    np.testing.assert_array_equal(single.reset()[0], held.reset()[0])
    for number, action in enumerate(np.random.default_rng(0).uniform(-1, 1, (334, 1)).astype(np.float32)):
        observation, reward, terminated, truncated, info = held.step(action)
        steps = [single.step(action) for _ in range(1 if number == 333 else 3)]  # 1000 in all
        assert reward == pytest.approx(sum(step[1] for step in steps), rel=1e-12)
        np.testing.assert_array_equal(observation, steps[-1][0])
        assert (terminated, truncated, info) == (False, steps[-1][3], {})
    assert truncated


def test_bad_arguments_are_named():
    for seeds, repeat, message in (([], 1, r"seeds is \[\]"), ([0, -4], 1, "-4"), ([0], 0, "repeat is 0")):
        with pytest.raises(ArgumentError, match=message):
            make_environments(CARTPOLE, seeds, repeat)
