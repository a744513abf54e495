"""Tasks of the walker that dm_control lacks: ExoRL's ``flip``, and our ``run_backward``."""

from collections.abc import Callable
from typing import Any

from dm_control.rl.control import Environment
from dm_control.suite import walker
from dm_control.utils.rewards import tolerance

_TIME_LIMIT_SECONDS = 25.0
_CONTROL_TIMESTEP_SECONDS = 0.025
_RUN_SPEED = 8.0
_FLIP_MOMENTUM = 5.0


def _run_backward(physics: walker.Physics):
    """dm_control's reward for running, in the opposite direction."""
    bounds = (_RUN_SPEED, float("inf"))
    speed = -physics.horizontal_velocity()
    return tolerance(speed, bounds, margin=_RUN_SPEED / 2, value_at_margin=0.5, sigmoid="linear")


def _flip(physics: walker.Physics):
    """The reward for angular momentum about the axis perpendicular to the plane."""
    bounds = (_FLIP_MOMENTUM, float("inf"))
    momentum = physics.named.data.subtree_angmom["torso"][1]
    return tolerance(momentum, bounds, margin=_FLIP_MOMENTUM, value_at_margin=0, sigmoid="linear")


_MOVEMENTS = {"flip": _flip, "run_backward": _run_backward}


class _Walker(walker.PlanarWalker):
    """A walker task that rewards standing and a movement."""

    def __init__(self, movement: Callable[[walker.Physics], Any], random: int):
        super().__init__(move_speed=0, random=random)  # its reward is that for standing
        self._movement = movement

    def get_reward(self, physics: walker.Physics) -> Any:
        return super().get_reward(physics) * (5 * self._movement(physics) + 1) / 6


def load(task: str, seed: int) -> Environment:
    """The environment of ``task``; its initial states come from ``seed``."""
    return Environment(
        walker.Physics.from_xml_string(*walker.get_model_and_assets()),
        _Walker(_MOVEMENTS[task], random=seed),
        time_limit=_TIME_LIMIT_SECONDS,
        control_timestep=_CONTROL_TIMESTEP_SECONDS,
    )
