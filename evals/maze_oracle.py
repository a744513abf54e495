"""A controller that knows the goal and the walls of the point-mass maze: an upper bound on returns there."""

from itertools import pairwise

import numpy as np

_PASSAGE = 0.21
"""Distance in metres from the middle of the maze at which walls are passed; they end at 0.18."""
_TIME_CONSTANT, _SPEED = 0.3, 0.1
"""Seconds in which a body without force falls to 37% of its speed, and metres a second at full force."""
_ARRIVAL = 0.2
"""Seconds in which the distance is to fall to 37%."""


class MazeOracle:
    """A ``rollouts.trials.TrialPolicy`` that goes to positions [E, 2] in metres and stays there.

    The rooms are quadrants. The way to the next one leads beside the end of the wall between them, and that
    to the opposite one through whichever neighbour is shorter. Forces make the velocity proportional to the
    distance from the end of the way's first piece.
    """

    def __init__(self, goals: np.ndarray):
        self._goals = goals

    def begin_trial(self) -> None:
        """Does nothing: the way is found anew at every decision."""

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Actions float32 [E, 2] for positions and velocities [E, 4]."""
        position, velocity = np.split(observation.astype(np.float64), 2, axis=1)
        wanted = (self._waypoints(position) - position) / _ARRIVAL
        force = wanted + (wanted - velocity) * _TIME_CONSTANT / _ARRIVAL
        return np.clip(force / _SPEED, -1, 1).astype(np.float32)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Does nothing."""

    def _waypoints(self, position: np.ndarray) -> np.ndarray:
        goals, across = self._goals, np.sign(position) != np.sign(self._goals)
        # Through the left or right passage (0) or the upper or lower one (1), on the side of the body.
        passages = np.stack([np.sign(position) * axis * _PASSAGE for axis in np.eye(2)])
        last = np.stack([np.sign(goals) * axis * _PASSAGE for axis in np.eye(2)[::-1]])
        pieces = pairwise((position, passages, last, goals))
        length = np.sum([np.linalg.norm(end - start, axis=-1) for start, end in pieces], axis=0)
        first = np.where(across.all(axis=1), length.argmin(axis=0), across[:, 0].astype(int))
        through = passages[first, np.arange(len(goals))]
        return np.where(across.any(axis=1)[:, None], through, goals)
