"""The families of this repository: dm_control's point mass and reacher.

To add a family, write a subclass of ``Family`` and enter it in ``FAMILIES``.
"""

from dataclasses import replace

import numpy as np

from agentic_ring.data.hidden_tasks.family import Family, HeldNoise
from agentic_ring.errors import UnknownNameError

_REACH = 0.25
"""Largest distance of spots and starts from the centre along each axis in metres; the walls are at 0.29 m."""
_CELLS = 5
"""Cells along each side of the square, and both rings and sectors of the reacher's disc."""
CHECKERBOARD = tuple(_CELLS * row + 2 * row % _CELLS for row in range(_CELLS))
"""One cell in each row and each column, no two of them neighbours."""


class PointMass(Family):
    """Cue -> spot: reward 1 within 2 cm of the spot, falling linearly to 0 at 12 cm.

    A trial starts anywhere at rest and has 8 decisions of 0.6 s. Held random actions explore the square.
    """

    body = "point_mass"
    suite_task = ("point_mass", "easy")
    physics_dim = body_dim = 4
    action_dim = 2
    goal_dim = 2
    standard_physics_steps = 10
    near, far = 0.02, 0.12
    goal_scale = 0.15
    regions = start_cells = _CELLS**2
    noise = HeldNoise(redraw=0.35, idle=0.4, gain=2.0)

    def draw_starts(self, random: np.random.Generator, count: int) -> np.ndarray:
        position = random.uniform(-_REACH, _REACH, (count, 2))
        return np.concatenate([position, np.zeros((count, 2))], axis=1).astype(np.float32)

    def start_cell(self, starts: np.ndarray) -> np.ndarray:
        return self.region(starts[:, :2])

    def draw_any_goals(self, random: np.random.Generator, count: int) -> np.ndarray:
        return random.uniform(-_REACH, _REACH, (count, 2))

    def region(self, goals: np.ndarray) -> np.ndarray:
        """Returns 5 x row + column of each spot's cell."""
        return _cell(goals, -_REACH, _REACH, _CELLS) @ np.array([_CELLS, 1])

    def observe(self, physics: np.ndarray) -> np.ndarray:
        return physics.astype(np.float32)

    def outcome(self, paths: np.ndarray) -> np.ndarray:
        return paths[..., 1:, :2]


_LINK = 0.12
"""Length of each link in metres."""
_WRIST = np.deg2rad(160)
"""Limit of the wrist's angle in either direction."""
_INNER, _OUTER = 0.05, 0.2
"""Distances of targets from the shoulder in metres, as in dm_control."""
_START_SECTORS, _START_BENDS = 8, 3


class Reacher(Family):
    """Cue -> position of the finger: reward 1 within 1.5 cm of it, falling linearly to 0 at 6.5 cm.

    An arm of two links in the plane starts a trial in any pose at rest and has 8 decisions of 0.3 s. Held
    random torques explore all poses: damping turns them into nearly constant speeds.
    """

    body = "reacher"
    suite_task = ("reacher", "easy")
    physics_dim = 4
    body_dim = 8
    action_dim = goal_dim = 2
    standard_physics_steps = 5
    near, far = 0.015, 0.065
    goal_scale = 0.1
    regions = _CELLS**2
    start_cells = _START_SECTORS * _START_BENDS
    noise = HeldNoise(redraw=0.6, idle=0.4, gain=0.6)

    def draw_starts(self, random: np.random.Generator, count: int) -> np.ndarray:
        limits = np.array([np.pi, _WRIST])
        angles = random.uniform(-limits, limits, (count, 2))
        return np.concatenate([angles, np.zeros((count, 2))], axis=1).astype(np.float32)

    def start_cell(self, starts: np.ndarray) -> np.ndarray:
        sector = _cell(starts[:, 0], -np.pi, np.pi, _START_SECTORS)
        return sector * _START_BENDS + _cell(starts[:, 1], -_WRIST, _WRIST, _START_BENDS)

    def draw_any_goals(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws positions as dm_control draws its targets: uniform in angle and in distance."""
        angle, radius = random.uniform(-np.pi, np.pi, count), random.uniform(_INNER, _OUTER, count)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

    def region(self, goals: np.ndarray) -> np.ndarray:
        """Returns 5 x ring + sector of each position."""
        ring = _cell(np.hypot(goals[:, 0], goals[:, 1]), _INNER, _OUTER, _CELLS)
        return ring * _CELLS + _cell(np.arctan2(goals[:, 1], goals[:, 0]), -np.pi, np.pi, _CELLS)

    def observe(self, physics: np.ndarray) -> np.ndarray:
        """Returns cosines and sines of shoulder and wrist, the joints' speeds, and the finger's position."""
        exact = physics.astype(np.float64)
        angles = np.ascontiguousarray(exact[..., :2])
        parts = [np.cos(angles), np.sin(angles), exact[..., 2:], _finger(exact)]
        return np.concatenate(parts, axis=-1).astype(np.float32)

    def outcome(self, paths: np.ndarray) -> np.ndarray:
        return _finger(paths[..., 1:, :])


def _cell(values: np.ndarray, low: float, high: float, cells: int) -> np.ndarray:
    """Returns the number of each value's cell, of equal ``cells`` from ``low`` to ``high``."""
    return ((values - low) / (high - low) * cells).astype(int).clip(0, cells - 1)


def _finger(physics: np.ndarray) -> np.ndarray:
    """Returns the finger's position [..., 2] in states float64 [..., P]."""
    shoulder = np.ascontiguousarray(physics[..., 0])
    wrist = shoulder + physics[..., 1]
    along = _LINK * np.cos(shoulder) + _LINK * np.cos(wrist)
    return np.stack([along, _LINK * np.sin(shoulder) + _LINK * np.sin(wrist)], axis=-1)


FAMILIES: dict[str, Family] = {
    family.name: family for family in (PointMass(held_out=CHECKERBOARD), Reacher(held_out=CHECKERBOARD))
}


def family_named(name: str) -> Family:
    """Returns the family with this name, such as point_mass, or point_mass-128 with 128 decisions a trial.

    Raises:
      UnknownNameError: there is no such family.
      ConfigError: its trials cannot have this number of decisions.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    body, _, decisions = name.partition("-")
    if body in FAMILIES and decisions.isdecimal() and decisions.isascii():
        family = replace(FAMILIES[body], decisions=int(decisions))
        if family.name == name:
            return family
    raise UnknownNameError("family", name, tuple(FAMILIES))
