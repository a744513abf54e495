"""Decisions that lead to goals: shortest paths over stored transitions, compared with brute force."""

from itertools import pairwise

import numpy as np
import pytest

from agentic_ring.data.goal_distances import GoalDistances
from agentic_ring.errors import DataError

RADIUS, CELL = 0.03, 0.01
RANDOM = np.random.default_rng(0)


def walks(episodes: int, decisions: int) -> np.ndarray:
    """Random walks on the cells (i, j) with 0 <= i, j < 8, of which a wall leaves out (4, 0) to (4, 6)."""
    cell, path = RANDOM.choice([0, 1, 2, 3, 5, 6, 7], (episodes, 2)), []
    for _ in range(decisions):
        to = np.clip(cell + RANDOM.integers(-1, 2, cell.shape), 0, 7)
        cell = np.where(((to[:, 0] == 4) & (to[:, 1] < 7))[:, None], cell, to)
        path.append(cell)
    return (np.stack(path, axis=1) + RANDOM.uniform(0.1, 0.9, (episodes, decisions, 2))) * CELL


def brute_force(positions: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Decisions from each cell to the goal, [E, D], by repeated relaxation over all stored transitions."""
    cells = [[tuple(cell) for cell in each] for each in np.floor(positions / CELL).tolist()]
    away = {cell: np.inf for each in cells for cell in each}
    for cell in away:
        if np.linalg.norm((np.array(cell) + 0.5) * CELL - goal) <= RADIUS:
            away[cell] = 0
    for _ in away:
        for each in cells:
            for before, after in pairwise(each):
                away[before] = min(away[before], away[after] + 1)
    return np.array([[away[cell] for cell in each] for each in cells])


def test_distances_are_those_of_brute_force():
    positions, goals = walks(12, 30), np.array([[0.075, 0.035], [0.01, 0.01], [0.035, 0.075]])
    found = GoalDistances(positions, goals, RADIUS)
    for goal in goals:
        np.testing.assert_array_equal(found.distances(goal), brute_force(positions, goal))


def test_decisions_that_lead_to_the_goal_are_drawn():
    """Each of those that come closer by one in each of three decisions, or stay, and no other."""
    positions, goal = walks(40, 30), np.array([0.075, 0.035])
    away = brute_force(positions, goal)
    leading = {
        (episode, start + 1)
        for episode in range(40)
        for start in range(27)
        if away[episode, start + 3] == max(away[episode, start] - 3, 0)
    }
    drawn = GoalDistances(positions, goal[None], RADIUS).draw(np.random.default_rng(1), 0, 5000)
    assert {*map(tuple, drawn.tolist())} == leading
    assert 20 < len(leading) < 500


def test_what_cannot_be_learned_is_named():
    positions = walks(3, 10)
    with pytest.raises(DataError, match=r"ends within 0.03 m of the goal \[1.0, 1.0\]"):
        GoalDistances(positions, [[1.0, 1.0]], RADIUS)
    away_from_the_goal = np.linspace([0.0, 0.0], [0.5, 0.0], 10)[None]
    with pytest.raises(DataError, match=r"leads to the goal \[0.0, 0.0\]"):
        GoalDistances(away_from_the_goal, [[0.0, 0.0]], RADIUS)
    with pytest.raises(DataError, match="have 3 decisions"):
        GoalDistances(positions[:, :3], [[0.0, 0.0]], RADIUS)
