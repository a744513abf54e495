"""dm_control's reacher, an arm of two links in the plane; a goal is a position of its finger."""

import numpy as np

from agentic_ring.data.families.family import Family, HeldNoise

_LINK = 0.12
"""Length of each link in metres."""
_WRIST = np.deg2rad(160)
"""Limit of the wrist's angle in either direction."""
_INNER, _OUTER = 0.05, 0.2
"""Distances of targets from the shoulder in metres, as in dm_control."""
_RINGS = _SECTORS = 5
_START_SECTORS, _START_BENDS = 8, 3


class Reacher(Family):
    """Cue -> position: reward 1 within 1.5 cm of it, falling linearly to 0 at 6.5 cm.

    A trial starts in any pose at rest and has 8 decisions of 0.3 s. Held random torques explore all poses;
    the joints' damping turns a held torque into a nearly constant speed.
    """

    body = "reacher"
    suite_task = ("reacher", "easy")
    physics_dim = 4
    body_dim = 8
    action_dim = goal_dim = 2
    standard_physics_steps = 5
    near, far = 0.015, 0.065
    goal_scale = 0.1
    regions = _RINGS * _SECTORS
    start_cells = _START_SECTORS * _START_BENDS
    noise = HeldNoise(redraw=0.6, idle=0.4, gain=0.6)

    def draw_starts(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws poses with any angles of the joints."""
        limits = np.array([np.pi, _WRIST])
        angles = random.uniform(-limits, limits, (count, 2))
        return np.concatenate([angles, np.zeros((count, 2))], axis=1).astype(np.float32)

    def start_cell(self, starts: np.ndarray) -> np.ndarray:
        """Returns the cell of the joints' angles."""
        sector = _cell(starts[:, 0], -np.pi, np.pi, _START_SECTORS)
        return sector * _START_BENDS + _cell(starts[:, 1], -_WRIST, _WRIST, _START_BENDS)

    def draw_any_goals(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws positions as dm_control draws its targets: uniform in angle and in distance."""
        angle, radius = random.uniform(-np.pi, np.pi, count), random.uniform(_INNER, _OUTER, count)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

    def region(self, goals: np.ndarray) -> np.ndarray:
        """Returns 5 x ring + sector of each position."""
        ring = _cell(np.hypot(goals[:, 0], goals[:, 1]), _INNER, _OUTER, _RINGS)
        return ring * _SECTORS + _cell(np.arctan2(goals[:, 1], goals[:, 0]), -np.pi, np.pi, _SECTORS)

    def observe(self, physics: np.ndarray) -> np.ndarray:
        """Returns cosines and sines of shoulder and wrist, the joints' speeds, and the finger's position."""
        exact = physics.astype(np.float64)
        angles = np.ascontiguousarray(exact[..., :2])
        parts = [np.cos(angles), np.sin(angles), exact[..., 2:], _finger(exact)]
        return np.concatenate(parts, axis=-1).astype(np.float32)

    def outcome(self, paths: np.ndarray) -> np.ndarray:
        """Returns the finger's position in metres after each sub-step."""
        return _finger(paths[..., 1:, :])


def _cell(values: np.ndarray, low: float, high: float, cells: int) -> np.ndarray:
    return ((values - low) / (high - low) * cells).astype(int).clip(0, cells - 1)


def _finger(physics: np.ndarray) -> np.ndarray:
    """The finger's position [..., 2] in states float64 [..., P]."""
    shoulder = np.ascontiguousarray(physics[..., 0])
    wrist = shoulder + physics[..., 1]
    along = _LINK * np.cos(shoulder) + _LINK * np.cos(wrist)
    return np.stack([along, _LINK * np.sin(shoulder) + _LINK * np.sin(wrist)], axis=-1)
