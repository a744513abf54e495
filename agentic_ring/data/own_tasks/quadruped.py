"""ExoRL's tasks of the quadruped: dm_control's ``walk`` and ``run``, and ``stand`` and ``jump``."""

from typing import Any

from dm_control.suite import common, quadruped
from dm_control.utils.rewards import tolerance

from agentic_ring.data.own_tasks import UnitActions

_SPEEDS = {"walk": 0.5, "run": 5.0}
_JUMP_HEIGHT = 1.0


class _Quadruped(UnitActions, quadruped.Move):
    """A quadruped task; its reward is that for an upright torso times that for speed or height."""

    def __init__(self, task: str, random: int):
        super().__init__(desired_speed=_SPEEDS.get(task, 0.0), random=random)
        self._task = task

    def get_reward(self, physics: quadruped.Physics) -> Any:
        if self._task in _SPEEDS:
            return super().get_reward(physics)
        # Linear in the cosine of the torso's tilt, as quadruped's other tasks have it.
        upright = tolerance(
            physics.torso_upright(), (1, float("inf")), margin=2, value_at_margin=0, sigmoid="linear"
        )
        if self._task == "stand":
            return upright
        height = physics.named.data.sensordata["center_of_mass"][2]
        bounds = (_JUMP_HEIGHT, float("inf"))
        return upright * tolerance(height, bounds, _JUMP_HEIGHT, value_at_margin=0.5, sigmoid="linear")


def make(task: str, seed: int) -> tuple[quadruped.Physics, _Quadruped]:
    """Makes the physics and the task with this name."""
    model = quadruped.make_model(floor_size=100.0)  # only rendered: the physical floor is infinite
    return quadruped.Physics.from_xml_string(model, common.ASSETS), _Quadruped(task, random=seed)
