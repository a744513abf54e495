"""A controller that is told the goal: it plans in MuJoCo's physics of the body, whatever the body is.

It is told what a task hides, so its return bounds what can be learned; it is not optimal. At each decision it
measures in MuJoCo how the next states answer to each entry of its last plan, and searches plans in this
linear model by the cross-entropy method. It then does the same around the plan that was found. On reacher,
searching in MuJoCo itself takes five times as many physics steps and earns less.
"""

from dataclasses import dataclass

import numpy as np

from agentic_ring.data.families import Family
from agentic_ring.data.families.physics_rollout import PhysicsRollout

_SPREADS = (1.0, 0.3)
"""Standard deviation of the actions that are searched first, in each linear model in turn."""
_SEARCHED = 48
"""Action sequences per iteration."""
_ELITES = 6
_ITERATIONS = 3
_HORIZON = 2
"""Decisions of a plan."""
_PROBE = 0.5
"""Change of an action that measures the answer to it; a large one sees through the contacts of a gait."""
_APPROACH = 0.1
"""Weight of the error in what a plan maximises; far from the goal all rewards are 0."""


@dataclass
class Planner:
    """Plans actions for E bodies at once.

    Attributes:
      family: the body.
      physics: its physics.
      random: draws the searched actions.
    """

    family: Family
    physics: PhysicsRollout
    random: np.random.Generator

    def actions(self, states: np.ndarray, goals: np.ndarray, plans: np.ndarray | None = None) -> np.ndarray:
        """Plans from states [E, P] to goals [E, G]: actions [E, H, A] in [-1, 1].

        Args:
          plans: the result of the previous decision, to continue from; None if there is none.
        """
        found = np.zeros((len(states), _HORIZON, self.family.action_dim))
        if plans is not None:
            found[:, :-1] = plans[:, 1:]
        for spread in _SPREADS:
            found = self._search(states, goals, found.reshape(len(states), -1), spread)
        return found

    def _search(self, states: np.ndarray, goals: np.ndarray, plans: np.ndarray, spread: float) -> np.ndarray:
        """The best plans [E, H, A] in the linear model around ``plans`` [E, H x A]."""
        path, slopes = self._linear_model(states, plans)
        mean, spreads = plans, np.full(plans.shape, spread)
        for _ in range(_ITERATIONS):
            noise = self.random.normal(size=(len(plans), _SEARCHED, plans.shape[1]))
            drawn = (mean[:, None] + spreads[:, None] * noise).clip(-1, 1)
            drawn[:, 0] = mean
            values = self._values(path[:, None] + (drawn - plans[:, None]) @ slopes, goals)
            best = np.argsort(-values, axis=1)[:, :_ELITES, None]
            elites = np.take_along_axis(drawn, best, axis=1)
            mean, spreads = elites.mean(axis=1), elites.std(axis=1)
        return mean.reshape(len(plans), _HORIZON, -1)

    def _linear_model(self, states: np.ndarray, plans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """States that ``plans`` [E, H x A] pass, [E, X], and their slopes in each entry, [E, H x A, X]."""
        size, entries = plans.shape
        probes = np.where(plans > 0, -_PROBE, _PROBE)
        tried = np.repeat(plans[:, None], 1 + entries, axis=1)
        tried[:, 1:] += probes[:, None] * np.eye(entries)
        starts = np.repeat(states, 1 + entries, axis=0)
        paths = self.physics.paths(starts, tried.reshape(len(starts), _HORIZON, -1))
        paths = paths.reshape(size, 1 + entries, -1)
        return paths[:, 0], (paths[:, 1:] - paths[:, :1]) / probes[..., None]

    def _values(self, paths: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """What paths [E, M, X] earn, less their error: [E, M]."""
        states = paths.reshape(*paths.shape[:2], -1, self.family.physics_dim)
        error = self.family.error(self.family.outcome(states), goals[:, None, None])
        return (self.family.dense(error) - _APPROACH * error / self.family.far).sum(axis=-1)
