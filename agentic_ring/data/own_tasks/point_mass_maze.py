"""ExoRL's point-mass maze: a point mass moves from the upper left of four rooms to a target in one of them.

It is dm_control's ``point_mass`` with ExoRL's changes: two walls cross in the middle and leave a passage at
each end, contacts are enabled, and the point mass starts anywhere in the upper left room. In the task
``explore`` it starts in any room, and nothing is rewarded.
"""

import xml.etree.ElementTree as ET
from collections import OrderedDict
from typing import Any

import numpy as np
from dm_control.suite import base, common, point_mass
from dm_control.utils.rewards import tolerance

from agentic_ring.data.rewards.tasks import TARGET_RADII, TARGETS

_TARGET_RADIUS = TARGET_RADII["point_mass_maze"]
_HEIGHT = 0.01  # of the point mass
# Half lengths in metres. The square reaches to 0.3, so the passages are 0.12 wide.
_WALLS = {"wall_across": (0.18, 0.02, 0.02), "wall_along": (0.02, 0.18, 0.02)}
_START_LOWER, _START_UPPER = (-0.29, 0.15), (-0.15, 0.29)
_ROOM = 0.03, 0.29  # of either coordinate of the point mass, without its sign


class _Reach(base.Task):
    """Rewards closeness to the target, reduced by up to a fifth for large controls."""

    def __init__(self, target: tuple[float, float, float], random: int):
        super().__init__(random=random)
        self._target = np.array(target)

    def initialize_episode(self, physics: point_mass.Physics) -> None:
        physics.data.qpos[:] = self.random.uniform(_START_LOWER, _START_UPPER)
        super().initialize_episode(physics)

    def get_observation(self, physics: point_mass.Physics) -> Any:
        return OrderedDict(position=physics.position(), velocity=physics.velocity())

    def get_reward(self, physics: point_mass.Physics) -> Any:
        distance = np.linalg.norm(self._target - physics.named.data.geom_xpos["pointmass"])
        near = tolerance(distance, (0, _TARGET_RADIUS), margin=_TARGET_RADIUS)
        small = np.mean(tolerance(physics.control(), margin=1, value_at_margin=0, sigmoid="quadratic"))
        return near * (small + 4) / 5


class _Explore(_Reach):
    """Rewards nothing."""

    def initialize_episode(self, physics: point_mass.Physics) -> None:
        super().initialize_episode(physics)
        physics.data.qpos[:] = self.random.uniform(*_ROOM, 2) * self.random.choice([-1, 1], 2)

    def get_reward(self, physics: point_mass.Physics) -> Any:
        return 0.0


def _model(target: tuple[float, float, float]) -> str:
    """XML of the maze, made from dm_control's ``point_mass``."""
    model = ET.fromstring(point_mass.get_model_and_assets()[0])
    paths = "option/flag", "worldbody", "worldbody/geom[@name='target']"
    flag, world, shown = (next(model.iterfind(path)) for path in paths)
    del flag.attrib["contact"]
    shown.attrib.update({"pos": " ".join(map(str, target)), "contype": "0", "conaffinity": "0"})
    for name, size in _WALLS.items():
        shape = {"type": "box", "pos": "0 0 .02", "size": " ".join(map(str, size)), "material": "decoration"}
        ET.SubElement(world, "geom", shape, name=name)
    return ET.tostring(model, encoding="unicode")


def make(task: str, seed: int) -> tuple[point_mass.Physics, _Reach]:
    """Makes the physics and the task with this name."""
    target = (*TARGETS["point_mass_maze"].get(task, (0.0, 0.0)), _HEIGHT)
    physics = point_mass.Physics.from_xml_string(_model(target), common.ASSETS)
    return physics, (_Explore if task == "explore" else _Reach)(target, random=seed)
