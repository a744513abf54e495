"""Which stored decisions lead to a goal: shortest paths over stored transitions.

    . . G        A decision moves the body from one cell of space to another. Over all stored decisions these
    . 1 2        moves are a directed graph; the distance of a cell from the goal is the smallest number of
    3 2 3        decisions that lead there, pieced together from any trajectories.

``AHEAD`` decisions can shorten the distance by as many. Where they do, or stay at the goal, the first of them
leads to it. No learner is needed, no model of the space, and no trajectory that goes all the way.
"""

from collections.abc import Sequence

import numpy as np

from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra

with needs_extra("models"):
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

# With more decisions ahead the first of them matters less; in wider cells distances are too coarse. Of those
# that were tried in the maze these give the actions that a state and a goal determine best.
AHEAD = 3
_CELLS_PER_RADIUS = 3


class GoalDistances:
    """Draws decisions that lead to goals.

    Args:
      positions: [E, D, P], where each decision of E trajectories ended, in metres.
      goals: [G, P].
      radius: distance from a goal in metres within which it is reached; a cell is a third as wide.

    Attributes:
      meeting: for each goal the numbers of the trajectories that reach it.

    Raises:
      DataError: trajectories are too short, or no decision ended at one of the goals or leads to it.
    """

    def __init__(self, positions: np.ndarray, goals: Sequence[Sequence[float]] | np.ndarray, radius: float):
        episodes, decisions, dimensions = positions.shape
        if decisions <= AHEAD:
            raise DataError(f"trajectories have {decisions} decisions; distances need more than {AHEAD}")
        width = radius / _CELLS_PER_RADIUS
        corners = np.floor(positions.reshape(-1, dimensions) / width)
        occupied, cells = np.unique(corners, axis=0, return_inverse=True)
        self._cells, self._centres = cells.reshape(episodes, decisions), (occupied + 0.5) * width
        self._radius = radius
        before, after = self._cells[:, :-1].ravel(), self._cells[:, 1:].ravel()
        # Backwards, as paths are searched from the goal. Moves that were made twice are added up.
        self._moves = csr_array((np.ones(before.size), (after, before)), shape=(len(occupied),) * 2)
        self._leading: list[np.ndarray] = []
        self.meeting: list[np.ndarray] = []
        for goal in np.asarray(goals):
            away = self.distances(goal).astype(np.float32)
            leading = _decisions_to_goal(away)
            if not leading.size:
                raise DataError(
                    f"no decision of the data leads to the goal {goal.round(3).tolist()}, which trajectories "
                    "only begin at or pass; leave the goal out, or use more data"
                )
            self._leading.append(leading)
            self.meeting.append(np.flatnonzero((away == 0).any(axis=1)))

    def distances(self, goal: np.ndarray) -> np.ndarray:
        """Decisions from where each one ended to a goal [P], float64 [E, D]; infinite if there is no way."""
        reached = np.flatnonzero(np.linalg.norm(self._centres - goal, axis=-1) <= self._radius)
        if not reached.size:
            raise DataError(
                f"no decision of the data ends within {self._radius:g} m of the goal "
                f"{goal.round(3).tolist()}; leave the goal out, or use data that reaches it"
            )
        return dijkstra(self._moves, indices=reached, unweighted=True, min_only=True)[self._cells]

    def draw(self, random: np.random.Generator, goal: int, count: int) -> np.ndarray:
        """Draws ``count`` decisions that lead to a goal, int [count, 2]: episode and number of each."""
        chosen = random.choice(self._leading[goal], count)
        episode, number = np.divmod(chosen, self._cells.shape[1] - AHEAD)
        return np.stack([episode, number + 1], axis=1)


def _decisions_to_goal(away: np.ndarray) -> np.ndarray:
    """Decisions that lead to a goal, of all but the first and last ones of trajectories; flat, int32.

    ``away`` has the distances [E, D] after each decision.
    """
    leads = np.isfinite(away[:, :-AHEAD]) & (away[:, AHEAD:] <= np.maximum(away[:, :-AHEAD] - AHEAD, 0))
    return np.flatnonzero(leads).astype(np.int32)
