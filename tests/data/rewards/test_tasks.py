"""Features and rewards of stored states are dm_control's, for every task of every domain."""

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS, Task, load_environment
from agentic_ring.data.rewards.features import compute_features
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.errors import ArgumentError, UnknownNameError
from tests.data_prep.exploration import uniform_episodes

# Features that tasks may not read, from dm_control's named data.
TORSO = {"torso_height": lambda d: d.xpos["torso", "z"], "torso_upright": lambda d: d.xmat["torso", "zz"]}
PLANAR = TORSO | {
    "torso_lean": lambda d: d.xmat["torso", "xz"],
    "torso_pitch_velocity": lambda d: d.qvel["rooty"],
    "vertical_velocity": lambda d: d.sensordata["torso_subtreelinvel"][2],
}
DM_CONTROL = {
    "walker": PLANAR | {"left_knee": lambda d: d.qpos["left_knee"]},
    "cheetah": PLANAR | {"ffoot_height": lambda d: d.xpos["ffoot", "z"]},
    "cartpole": {"pole_angle_sine": lambda d: d.xmat["pole_1", "xz"]},
    "quadruped": TORSO
    | {
        "upward_velocity": lambda d: d.sensordata["velocimeter"][2],
        "yaw_velocity": lambda d: d.sensordata["imu_gyro"][2],
        "toe_back_left_height": lambda d: d.xpos["toe_back_left", "z"],
    },
    "point_mass_maze": {"y_velocity": lambda d: d.qvel["root_y"]},
    "jaco": {"hand_z": lambda d: d.site_xpos["jaco_arm/jaco_hand/pinchsite", "z"]},
}


def states(domain):
    """States of a rollout and invented ones, some near targets: physics [R, P], actions [R, A]."""
    episode = uniform_episodes(domain, domain.tasks[:1], action_repeat=5, decisions=20)[0]
    random = np.random.default_rng(0)
    invented = random.normal(size=(100, domain.physics_dim)) * np.repeat([0.1, 1], 50)[:, None]
    if domain.name == "point_mass_maze":
        invented[:, :2] = random.choice([-0.15, 0.15], (100, 2)) + invented[:, :2] / 10
    actions = random.uniform(-1, 1, (100, domain.action_dim)).astype(np.float32)
    return np.concatenate([episode.physics, invented]), np.concatenate([episode.action, actions])


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS.keys())
def test_features_and_rewards_are_dm_controls(domain):
    physics, actions = states(domain)
    features = compute_features(domain, physics, actions)
    environments = {name: load_environment(Task(domain, name), seed=0) for name in domain.tasks}
    simulator = environments[domain.tasks[0]].physics
    expected = {name: [] for name in (*DM_CONTROL[domain.name], *domain.tasks)}
    for state, action in zip(physics, actions, strict=True):
        with simulator.reset_context():
            simulator.set_state(state)
        environments[domain.tasks[0]].task.before_step(action, simulator)
        for name, read in DM_CONTROL[domain.name].items():
            expected[name].append(np.asarray(read(simulator.named.data)).item())
        for name, environment in environments.items():
            expected[name].append(environment.task.get_reward(simulator))
    for name in DM_CONTROL[domain.name]:
        np.testing.assert_array_equal(features[name], expected[name], err_msg=name)
    for name in domain.tasks:
        reward = task_reward(Task(domain, name))(features)
        assert reward.dtype == np.float64
        assert np.ptp(reward) > 0, f"{name} is never rewarded"
        difference = reward.astype(np.float32) - np.array(expected[name], np.float32)
        assert np.abs(difference).max() == 0, name


def test_wrong_shapes_names_and_changes_are_refused():
    domain = DOMAINS["cartpole"]
    features = compute_features(domain, np.zeros((3, 4)), np.zeros((3, 1)))
    for physics, actions in ((np.zeros((3, 5)), np.zeros((3, 1))), (np.zeros((3, 4)), np.zeros((2, 1)))):
        with pytest.raises(ArgumentError, match=r"cartpole needs \[R, 4\] and \[R, 1\]"):
            compute_features(domain, physics, actions)
    with pytest.raises(UnknownNameError, match=r"unknown feature 'angle'; choose one of: cart_x, pole_angle"):
        features["angle"]
    with pytest.raises(ValueError, match="read-only"):
        features["cart_x"] += 1
