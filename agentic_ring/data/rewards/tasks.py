"""Rewards of the tasks of all domains as functions of features: dm_control's and those of ``own_tasks``."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import numpy as np

from agentic_ring.data.domains import Task
from agentic_ring.data.rewards.features import Features
from agentic_ring.extras import needs_extra

RewardOfFeatures = Callable[[Features], np.ndarray]
"""Returns the reward of each of R states, float64 [R]."""

POSITIONS = {"point_mass_maze": ("x", "y"), "jaco": ("hand_x", "hand_y", "hand_z")}
"""Features that are the position in a domain whose tasks are targets to reach."""
TARGETS = {
    "point_mass_maze": {
        "reach_top_left": (-0.15, 0.15),
        "reach_top_right": (0.15, 0.15),
        "reach_bottom_left": (-0.15, -0.15),
        "reach_bottom_right": (0.15, -0.15),
    },
    "jaco": {
        "reach_top_left": (-0.09, 0.09, 0.001),
        "reach_top_right": (0.09, 0.09, 0.001),
        "reach_bottom_left": (-0.09, -0.09, 0.001),
        "reach_bottom_right": (0.09, -0.09, 0.001),
    },
}
"""Position of each task's target, in metres."""
TARGET_RADII = {"point_mass_maze": 0.015, "jaco": 0.05}
"""Distance to the target, in metres, within which the reward is full."""


def task_reward(task: Task) -> RewardOfFeatures:
    """Returns the reward of ``task`` as a function of its domain's features."""
    return partial(_REWARDS[task.domain.name], task.name)


def tolerance(
    values: np.ndarray,
    bounds: tuple[float, float] = (0.0, 0.0),
    margin: float = 0.0,
    value_at_margin: float = 0.1,
    sigmoid: str = "gaussian",
) -> np.ndarray:
    """dm_control's ``tolerance``: 1 within ``bounds``, and falling to ``value_at_margin`` beside them."""
    with needs_extra("rl"):
        from dm_control.utils import rewards  # loads no MuJoCo

    return np.asarray(rewards.tolerance(values, bounds, margin, sigmoid, value_at_margin))


def distance(features: Features, names: Sequence[str], target: Sequence[float]) -> np.ndarray:
    """Returns the Euclidean distance of the named features from ``target``, float64 [R]."""
    offset = np.stack([features[name] - value for name, value in zip(names, target, strict=True)], axis=-1)
    return np.sqrt(np.vecdot(offset, offset))  # rounds as np.linalg.norm of one vector does


def _rising(values: np.ndarray, goal: float, margin: float, value_at_margin: float = 0.0) -> np.ndarray:
    """1 from ``goal`` on, and linear below it."""
    return tolerance(values, (goal, inf), margin, value_at_margin, "linear")


def _walker(task: str, features: Features) -> np.ndarray:
    standing = tolerance(features["torso_height"], (1.2, inf), margin=0.6)
    stand = (3 * standing + (1 + features["torso_upright"]) / 2) / 4
    if task == "stand":
        return stand
    if task == "flip":
        movement = _rising(features["angular_momentum"], 5.0, margin=5.0)
    else:
        speed = {"walk": 1.0, "run": 8.0, "run_backward": 8.0}[task]
        direction = -1 if task == "run_backward" else 1
        movement = _rising(direction * features["horizontal_velocity"], speed, speed / 2, 0.5)
    return stand * (5 * movement + 1) / 6


def _cheetah(task: str, features: Features) -> np.ndarray:
    name, goal = ("angular_momentum", 5.0) if "flip" in task else ("horizontal_velocity", 10.0)
    direction = -1 if task.endswith("backward") else 1
    return _rising(direction * features[name], goal, margin=goal)


def _cartpole(task: str, features: Features) -> np.ndarray:
    position, cosine = features["cart_x"], features["pole_angle_cosine"]
    if task == "swingup_sparse":
        return tolerance(position, (-0.25, 0.25)) * tolerance(cosine, (0.995, 1))
    upright = (cosine + 1) / 2
    centred = (1 + tolerance(position, margin=2)) / 2
    control = tolerance(features["control"], margin=1, value_at_margin=0, sigmoid="quadratic")
    still = (1 + tolerance(features["pole_angle_velocity"], margin=5)) / 2
    return upright * ((4 + control) / 5) * still * centred


def _quadruped(task: str, features: Features) -> np.ndarray:
    upright = _rising(features["torso_upright"], 1.0, margin=2)
    if task == "stand":
        return upright
    if task == "jump":
        return upright * _rising(features["center_of_mass_height"], 1.0, 1.0, 0.5)
    speed = {"walk": 0.5, "run": 5.0}[task]
    return upright * _rising(features["forward_velocity"], speed, speed, 0.5)


def _reach(domain: str, task: str, features: Features) -> np.ndarray:
    radius = TARGET_RADII[domain]
    return tolerance(distance(features, POSITIONS[domain], TARGETS[domain][task]), (0, radius), margin=radius)


def _maze(task: str, features: Features) -> np.ndarray:
    controls = np.stack([features["control_x"], features["control_y"]])
    small = np.mean(tolerance(controls, margin=1, value_at_margin=0, sigmoid="quadratic"), axis=0)
    return _reach("point_mass_maze", task, features) * (small + 4) / 5


_REWARDS = {
    "walker": _walker,
    "cheetah": _cheetah,
    "cartpole": _cartpole,
    "quadruped": _quadruped,
    "point_mass_maze": _maze,
    "jaco": partial(_reach, "jaco"),
}
