"""Physical features of stored states: what rewards are functions of.

Names, with units of metres, radians and seconds; velocities of joints end in ``_velocity``:

    walker, cheetah   torso_height, torso_upright (cosine of its tilt), torso_lean (sine of it), torso_pitch
                      (not wrapped), height of each foot, angle of each joint; of the whole body
                      horizontal_velocity, vertical_velocity and angular_momentum (kg m^2/s, about y)
    cartpole          cart_x, pole_angle, pole_angle_cosine, pole_angle_sine, control
    quadruped         torso_height, torso_upright, center_of_mass_height, height of each toe; velocity of the
                      torso in its own frame: forward_, lateral_, upward_; roll_, pitch_ and yaw_velocity
    point_mass_maze   x, y, speed, control_x, control_y
    jaco              hand_x, hand_y, hand_z of the point between the fingers

MuJoCo itself computes what a body's pose determines, by the stages that a feature needs and no others: the
values are dm_control's, bit for bit, without its collisions, constraints and sensors.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from agentic_ring.data.domains import Domain, Task, domain_named, load_environment
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.extras import needs_extra

# Names of the leading entries of qpos, which are columns of the physics; without a name it is no feature.
_WALKER_JOINTS = "right_hip", "right_knee", "right_ankle", "left_hip", "left_knee", "left_ankle"
_CHEETAH_JOINTS = "bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"
_JOINTS = {
    "walker": ("", "", "torso_pitch", *_WALKER_JOINTS),
    "cheetah": ("", "", "torso_pitch", *_CHEETAH_JOINTS),
    "cartpole": ("cart_x", "pole_angle"),
    "point_mass_maze": ("x", "y"),
}
_CONTROLS = {"cartpole": ("control",), "point_mass_maze": ("control_x", "control_y")}
_FEET = {
    "walker": ("right_foot", "left_foot"),
    "cheetah": ("bfoot", "ffoot"),
    "quadruped": ("toe_front_left", "toe_front_right", "toe_back_right", "toe_back_left"),
}
_TURNS_AND_VELOCITIES = "roll", "pitch", "yaw", "forward", "lateral", "upward"

_Stage = Callable[[Any, Any], None]
"""A function of MuJoCo that computes a part of the data from the model and other parts."""


class Features(dict[str, np.ndarray]):
    """Name -> float64 [R]; another name raises an ``UnknownNameError`` that lists those that exist."""

    def __missing__(self, name: str) -> np.ndarray:
        raise UnknownNameError("feature", name, tuple(self))


def compute_features(domain: Domain, physics: np.ndarray, actions: np.ndarray) -> Features:
    """Returns all features of R stored states of ``domain``; the arrays are read-only.

    Args:
      physics: float64 [R, P], MuJoCo's qpos, qvel and activations.
      actions: [R, A], the action that led to each state.

    Raises:
      ArgumentError: a shape is not that of the domain, or the numbers of rows differ.
    """
    found, expected = (physics.shape, actions.shape), (domain.physics_dim, domain.action_dim)
    if found != tuple((len(physics), width) for width in expected):
        raise ArgumentError(
            f"physics and actions have shapes {found}; {domain.name} needs [R, {expected[0]}] and "
            f"[R, {expected[1]}] with the same R"
        )
    joints = _JOINTS.get(domain.name, ())
    features = {name: physics[:, column] for column, name in enumerate(joints) if name}
    features |= {
        f"{name}_velocity": physics[:, len(joints) + column] for column, name in enumerate(joints) if name
    }
    features |= {name: actions[:, column] for column, name in enumerate(_CONTROLS.get(domain.name, ()))}
    if domain.name == "point_mass_maze":
        features["speed"] = np.hypot(features["x_velocity"], features["y_velocity"])
    else:
        features |= _simulated(domain, physics)
    table = np.stack(list(features.values()), dtype=np.float64)
    table.flags.writeable = False
    return Features(zip(features, table, strict=True))


@cache
def _physics(domain_name: str) -> Any:
    domain = domain_named(domain_name)
    return load_environment(Task(domain, domain.tasks[0]), seed=0).physics


def _simulated(domain: Domain, physics: np.ndarray) -> dict[str, np.ndarray]:
    """Sets the state of each row [R, P] in turn and reads the features, float64 [R] each."""
    model = _physics(domain.name).model.ptr
    with needs_extra("rl"):
        import mujoco  # after dm_control's suite, which turns graphics off
    data = mujoco.MjData(model)  # pyright: ignore[reportAttributeAccessIssue]
    stages, read = _stages_and_views(mujoco, domain.name, model, data)
    values, views = np.empty((len(physics), len(read))), list(read.values())
    positions, velocities = np.split(physics[:, : model.nq + model.nv], [model.nq], axis=1)
    qpos, qvel = data.qpos, data.qvel
    for position, velocity, row in zip(positions, velocities, values, strict=True):
        qpos[:], qvel[:] = position, velocity
        for stage in stages:
            stage(model, data)
        np.concatenate(views, out=row)
    return dict(zip(read, values.T, strict=True))


def _stages_and_views(
    mujoco: Any, name: str, model: Any, data: Any
) -> tuple[list[_Stage], dict[str, np.ndarray]]:
    """The stages that a domain's features need, and where in ``data`` each then is: float64 [1]."""
    if name == "jaco":
        hand = data.site("jaco_arm/jaco_hand/pinchsite").xpos
        return [mujoco.mj_kinematics], {f"hand_{axis}": hand[i : i + 1] for i, axis in enumerate("xyz")}
    if name == "cartpole":
        frame = data.body("pole_1").xmat
        return [mujoco.mj_kinematics], {"pole_angle_cosine": frame[8:9], "pole_angle_sine": frame[2:3]}
    torso = data.body("torso")
    views = {"torso_height": torso.xpos[2:3], "torso_upright": torso.xmat[8:9]}
    views |= {f"{foot}_height": data.body(foot).xpos[2:3] for foot in _FEET[name]}
    stages = [mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_comVel]
    if name == "quadruped":
        velocity, site = np.zeros(6), model.site("torso").id

        def torso_velocity(model: Any, data: Any) -> None:
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_SITE, site, velocity, 1)

        views["center_of_mass_height"] = torso.subtree_com[2:3]
        views |= {f"{each}_velocity": velocity[i : i + 1] for i, each in enumerate(_TURNS_AND_VELOCITIES)}
        return [*stages, torso_velocity], views
    views["torso_lean"] = torso.xmat[2:3]
    views["horizontal_velocity"], views["vertical_velocity"] = (
        torso.subtree_linvel[i : i + 1] for i in (0, 2)
    )
    views["angular_momentum"] = torso.subtree_angmom[1:2]
    return [*stages, mujoco.mj_subtreeVel], views
