"""Tasks of the walker that dm_control lacks: ExoRL's ``flip``, and our ``run_backward``."""

from typing import Any

from dm_control.suite import walker
from dm_control.utils.rewards import tolerance


class _Walker(walker.PlanarWalker):
    """A walker task that rewards standing and a movement."""

    def __init__(self, task: str, random: int):
        super().__init__(move_speed=0, random=random)  # its reward is that for standing
        self._task = task

    def get_reward(self, physics: walker.Physics) -> Any:
        if self._task == "flip":  # angular momentum about the axis perpendicular to the plane
            value, goal = physics.named.data.subtree_angmom["torso"][1], 5.0
            margin, value_at_margin = goal, 0.0
        else:  # dm_control's reward for running, in the opposite direction
            value, goal = -physics.horizontal_velocity(), 8.0
            margin, value_at_margin = goal / 2, 0.5
        bounds = (goal, float("inf"))
        movement = tolerance(value, bounds, margin, value_at_margin=value_at_margin, sigmoid="linear")
        return super().get_reward(physics) * (5 * movement + 1) / 6


def make(task: str, seed: int) -> tuple[walker.Physics, _Walker]:
    """Makes the physics and the task with this name."""
    return walker.Physics.from_xml_string(*walker.get_model_and_assets()), _Walker(task, random=seed)
