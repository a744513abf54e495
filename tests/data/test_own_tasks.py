"""Our own environments, compared with dm_control's where it has the same."""

import logging
from functools import partial

import numpy as np
import pytest
from dm_control import manipulation, suite
from dm_control.suite.wrappers import action_scale

from agentic_ring.data.domains import flatten_observation, load_environment, parse_task

ACTIONS = np.random.default_rng(0).uniform(-1, 1, (30, 12)).astype(np.float32)


def test_jaco_moves_and_observes_as_dm_controls_reach_site():
    """From one state, by the same actions, bit for bit; only the target's position is not observed."""
    ours = load_environment(parse_task("jaco_reach_top_left"), seed=0)
    theirs = action_scale.Wrapper(manipulation.load("reach_site_features", seed=0), minimum=-1, maximum=1)
    theirs.reset()
    ours.reset()
    start = theirs.physics.get_state()
    for physics in (ours.physics, theirs.physics):
        with physics.reset_context():
            physics.set_state(start)
    for action in ACTIONS[:20, :9]:
        got, expected = ours.step(action), theirs.step(action)
        np.testing.assert_array_equal(ours.physics.get_state(), theirs.physics.get_state())
        named = dict(expected.observation)
        assert named.pop("target_position").shape == (1, 3)
        assert list(got.observation) == list(named)
        for name, entry in named.items():
            np.testing.assert_array_equal(got.observation[name], entry[0])
    starts = [ours.reset().observation["jaco_arm/jaco_hand/pinch_site_pos"] for _ in range(12)]
    assert (np.min(starts, axis=0) >= [-0.21, -0.21, 0.01]).all()
    assert (np.max(starts, axis=0) <= [0.21, 0.21, 0.41]).all()
    assert (np.ptp(starts, axis=0) > 0.1).all()


@pytest.mark.parametrize("right", [-0.09, 0.09])
@pytest.mark.parametrize("top", [-0.09, 0.09])
def test_jaco_is_rewarded_for_its_hand_within_five_centimetres_of_the_spot(top, right):
    name = f"jaco_reach_{'top' if top > 0 else 'bottom'}_{'right' if right > 0 else 'left'}"
    environment = load_environment(parse_task(name), seed=0)
    environment.reset()
    physics, task = environment.physics, environment.task
    hand = physics.named.data.site_xpos["jaco_arm/jaco_hand/pinchsite"]
    target = np.array([right, top, 0.001])
    for distance, expected in ((0, 1), (0.049, 1), (0.1, 0.1), (0.3, 0)):
        hand[:] = target + np.array([0, 0, distance])
        assert task.get_reward(physics) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["walk", "run"])
def test_quadruped_is_dm_controls_with_actions_scaled(name):
    ours = load_environment(parse_task(f"quadruped_{name}"), seed=5)
    theirs = suite.load("quadruped", name, task_kwargs={"random": 5})
    theirs = action_scale.Wrapper(theirs, minimum=-1, maximum=1)
    steps = [(ours.reset(), theirs.reset())]
    steps += [(ours.step(action), theirs.step(action)) for action in ACTIONS]
    for got, expected in steps:
        assert got.reward == expected.reward
        observed = (flatten_observation(each.observation) for each in (got, expected))
        np.testing.assert_array_equal(*observed)


def reward_at(task, position=None, **velocities):
    environment = load_environment(parse_task(task), seed=0)
    with environment.physics.reset_context():
        if position is not None:
            environment.physics.named.data.qpos["root"] = [0, 0, *position]
        for joint, velocity in velocities.items():
            environment.physics.named.data.qvel[joint] = velocity
    return environment.task.get_reward(environment.physics)


def test_quadruped_stands_upright_and_jumps_up():
    upright, half, fallen = (1, 0, 0, 0), (0.5**0.5, 0.5**0.5, 0, 0), (0, 1, 0, 0)
    stand, jump = (partial(reward_at, f"quadruped_{name}") for name in ("stand", "jump"))
    assert (stand((0.6, *upright)), stand((0.6, *half))) == pytest.approx((1, 0.5))
    assert (jump((2.0, *upright)), jump((2.0, *fallen))) == pytest.approx((1, 0))
    assert 0.5 < jump((0.6, *upright)) < jump((0.9, *upright)) < 1


def pushed(actions, start=(-0.15, 0.15), steps=300):
    """Where the ball of the maze is after holding each of the actions, and its last reward."""
    environment = load_environment(parse_task("point_mass_maze_reach_bottom_right"), seed=0)
    environment.reset()
    environment.physics.data.qpos[:] = start
    for action in actions:
        for _ in range(steps):
            time_step = environment.step(np.array(action, np.float64))
    return time_step.observation["position"], time_step.reward


def test_mazes_walls_part_the_rooms_and_leave_a_passage_at_each_end():
    (x, y), _ = pushed([(1, 0)])
    assert x == pytest.approx(-0.03, abs=0.01), "stopped by the middle wall"
    assert y == pytest.approx(0.15, abs=1e-3)
    (_, y), _ = pushed([(0, -1)])
    assert y == pytest.approx(0.03, abs=0.01)
    (x, y), _ = pushed([(0, 1), (1, 0), (0, -1)])
    assert x > 0.25, "through the passage at the top"
    assert y < -0.25, "and through the one on the right"


def test_maze_rewards_closeness_to_the_spot_and_small_controls():
    assert pushed([(0, 0)], start=(0.15, -0.15), steps=1)[1] == pytest.approx(1)
    assert pushed([(0, 0)], start=(0.15, -0.25), steps=1)[1] < 1e-6
    assert pushed([(1, 1)], start=(0.15, -0.15), steps=1)[1] == pytest.approx(0.8)


def test_maze_starts_in_the_upper_left_room():
    environment = load_environment(parse_task("point_mass_maze_reach_top_left"), seed=0)
    starts = np.array([environment.reset().observation["position"] for _ in range(50)])
    assert (starts >= [-0.29, 0.15]).all()
    assert (starts <= [-0.15, 0.29]).all()
    assert (np.ptp(starts, axis=0) > 0.1).all()


@pytest.mark.parametrize("body", ["walker", "cheetah"])
def test_running_backward_is_running_the_other_way(body):
    for speed in (-12, -3, 0, 3, 12):
        forward = reward_at(f"{body}_run", rootx=speed)
        assert reward_at(f"{body}_run_backward", rootx=-speed) == pytest.approx(forward)
    assert reward_at(f"{body}_run_backward", rootx=-12) > reward_at(f"{body}_run_backward", rootx=12)


def test_flips_turn_one_way_and_the_other():
    for speed, expected in ((20, 1), (-20, 0)):
        assert reward_at("cheetah_flip", rooty=speed) == expected
        assert reward_at("cheetah_flip_backward", rooty=-speed) == expected
    assert reward_at("walker_flip", rooty=20) > reward_at("walker_flip", rooty=-20) + 0.5


def test_what_dm_control_says_of_itself_is_not_repeated(caplog):
    load_environment(parse_task("cheetah_run"), seed=0)
    logging.getLogger("absl").warning("Failed to converge after %d steps: err_norm=%g", 99, 0.3)
    logging.getLogger("absl").warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
