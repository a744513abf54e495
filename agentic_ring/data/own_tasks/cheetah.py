"""Tasks of ExoRL's cheetah that dm_control lacks: running backward and flipping in either direction."""

from typing import Any

from dm_control.suite import cheetah
from dm_control.utils.rewards import tolerance

# Whether angular momentum (not speed) is rewarded, its sign, and the value that earns full reward.
_MOVEMENTS = {"run_backward": (False, -1, 10.0), "flip": (True, 1, 5.0), "flip_backward": (True, -1, 5.0)}


class _Cheetah(cheetah.Cheetah):
    """A cheetah task that rewards a movement."""

    def __init__(self, task: str, random: int):
        super().__init__(random=random)
        self._spin, self._direction, self._goal = _MOVEMENTS[task]

    def get_reward(self, physics: cheetah.Physics) -> Any:
        momentum_about_y = physics.named.data.subtree_angmom["torso"][1]
        value = self._direction * (momentum_about_y if self._spin else physics.speed())
        goal = self._goal
        return tolerance(value, (goal, float("inf")), margin=goal, value_at_margin=0, sigmoid="linear")


def make(task: str, seed: int) -> tuple[cheetah.Physics, _Cheetah]:
    """Makes the physics and the task with this name."""
    return cheetah.Physics.from_xml_string(*cheetah.get_model_and_assets()), _Cheetah(task, random=seed)
