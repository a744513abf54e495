"""dm_control's point mass; a goal is a spot in the square that the mass moves in."""

import numpy as np

from agentic_ring.data.families.family import Family, HeldNoise

_REACH = 0.25
"""Largest distance of spots and starts from the centre along each axis in metres; the walls are at 0.29 m."""
_CELLS = 5
"""Cells along each side of the square."""
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
        """Draws positions anywhere in the square."""
        position = random.uniform(-_REACH, _REACH, (count, 2))
        return np.concatenate([position, np.zeros((count, 2))], axis=1).astype(np.float32)

    def start_cell(self, starts: np.ndarray) -> np.ndarray:
        """Returns the cell of each position."""
        return self.region(starts[:, :2])

    def draw_any_goals(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws spots anywhere in the square."""
        return random.uniform(-_REACH, _REACH, (count, 2))

    def region(self, goals: np.ndarray) -> np.ndarray:
        """Returns 5 x row + column of each spot's cell."""
        cells = ((goals + _REACH) / (2 * _REACH) * _CELLS).astype(int).clip(0, _CELLS - 1)
        return cells @ np.array([_CELLS, 1])

    def observe(self, physics: np.ndarray) -> np.ndarray:
        """Returns position and velocity."""
        return physics.astype(np.float32)

    def outcome(self, paths: np.ndarray) -> np.ndarray:
        """Returns the position in metres after each sub-step."""
        return paths[..., 1:, :2]
