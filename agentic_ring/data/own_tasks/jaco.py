"""ExoRL's Jaco tasks: an arm that moves its hand to one of four fixed targets on the floor.

Arm, hand, initial states and observations are those of dm_control's manipulation task
``reach_site_features``, except for the target's position, which ExoRL does not observe. That task is built on
dm_control's composer; these are suite tasks on the same model, so that they are handled like those of every
other domain.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
from dm_control import composer, mjcf
from dm_control.composer.initializers import ToolCenterPointInitializer
from dm_control.composer.variation.distributions import Uniform
from dm_control.entities.manipulators.base import RobotArm, RobotHand
from dm_control.manipulation.shared import arenas, constants, observations, robots, workspaces
from dm_control.utils.rewards import tolerance

from agentic_ring.data.own_tasks import UnitActions
from agentic_ring.data.rewards.tasks import TARGET_RADII, TARGETS

_TARGET_RADIUS = TARGET_RADII["jaco"]
_TARGETS = TARGETS["jaco"]
# Range of the hand's initial position, in metres.
_START_LOWER, _START_UPPER = (-0.2, -0.2, 0.02), (0.2, 0.2, 0.4)


class _Reach(UnitActions):
    """Rewards the closeness of the point between the fingers to the target; arm and hand are in ``scene``."""

    def __init__(self, scene: composer.Entity, arm: RobotArm, hand: RobotHand, task: str, random: int):
        super().__init__(random=random)
        self._target = np.array(_TARGETS[task])
        self._hand = hand
        self._hand_site = hand.tool_center_point.full_identifier  # pyright: ignore[reportAttributeAccessIssue]
        start = Uniform(_START_LOWER, _START_UPPER)  # pyright: ignore[reportArgumentType]
        self._place_hand = ToolCenterPointInitializer(hand, arm, start, workspaces.DOWN_QUATERNION)
        observables = composer.NullTask(scene).observables
        self._observables = {name: entry for name, entry in observables.items() if entry.enabled}

    def initialize_episode(self, physics: mjcf.Physics) -> None:
        self._hand.set_grasp(physics, close_factors=self.random.uniform())
        self._place_hand(physics, self.random)
        super().initialize_episode(physics)

    def get_observation(self, physics: mjcf.Physics) -> Any:
        # Copies, as some are views of the simulator's memory.
        return OrderedDict(
            (name, np.array(entry(physics, self.random))) for name, entry in self._observables.items()
        )

    def get_reward(self, physics: mjcf.Physics) -> Any:
        distance = np.linalg.norm(physics.named.data.site_xpos[self._hand_site] - self._target)
        return tolerance(distance, (0, _TARGET_RADIUS), margin=_TARGET_RADIUS)


def make(task: str, seed: int) -> tuple[mjcf.Physics, _Reach]:
    """Makes the physics and the task with this name."""
    scene = arenas.Standard()
    arm = robots.make_arm(obs_settings=observations.PERFECT_FEATURES)
    hand = robots.make_hand(obs_settings=observations.PERFECT_FEATURES)
    arm.attach(hand)
    scene.attach_offset(arm, offset=robots.ARM_OFFSET)
    workspaces.add_target_site(
        scene.mjcf_model.worldbody,  # pyright: ignore[reportOptionalMemberAccess]
        _TARGET_RADIUS,
        visible=True,
        rgba=constants.RED,
        name="target",
        pos=_TARGETS[task],
    )
    return mjcf.Physics.from_mjcf_model(scene.mjcf_model), _Reach(scene, arm, hand, task, random=seed)
