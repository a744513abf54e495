"""Tasks of ExoRL's cheetah that dm_control lacks: running backward and flipping in either direction."""

from dataclasses import dataclass
from typing import Any

from dm_control.rl.control import Environment
from dm_control.suite import cheetah
from dm_control.utils.rewards import tolerance

_TIME_LIMIT_SECONDS = 10.0


@dataclass(frozen=True)
class _Movement:
    """The rewarded quantity (angular momentum or speed), its sign, and the value that earns full reward."""

    spin: bool
    direction: int
    goal: float


_MOVEMENTS = {
    "run_backward": _Movement(spin=False, direction=-1, goal=10.0),
    "flip": _Movement(spin=True, direction=1, goal=5.0),
    "flip_backward": _Movement(spin=True, direction=-1, goal=5.0),
}


class _Cheetah(cheetah.Cheetah):
    """A cheetah task that rewards a movement."""

    def __init__(self, movement: _Movement, random: int):
        super().__init__(random=random)
        self._movement = movement

    def get_reward(self, physics: cheetah.Physics) -> Any:
        momentum_about_y = physics.named.data.subtree_angmom["torso"][1]
        value = self._movement.direction * (momentum_about_y if self._movement.spin else physics.speed())
        goal = self._movement.goal
        return tolerance(value, (goal, float("inf")), margin=goal, value_at_margin=0, sigmoid="linear")


def load(task: str, seed: int) -> Environment:
    """The environment of ``task``; its initial states come from ``seed``."""
    return Environment(
        cheetah.Physics.from_xml_string(*cheetah.get_model_and_assets()),
        _Cheetah(_MOVEMENTS[task], random=seed),
        time_limit=_TIME_LIMIT_SECONDS,
    )
