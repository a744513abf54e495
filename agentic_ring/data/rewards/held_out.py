"""Keeps held-out tasks out of the rewards that a model is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentic_ring.data.domains import Task
from agentic_ring.data.rewards.family import RewardFunction
from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.tasks import TARGETS, RewardOfFeatures, task_reward


@dataclass(frozen=True)
class Screening:
    """Rewards that are far enough from held-out ones, and numbers of those that were dropped."""

    kept: tuple[RewardFunction, ...]
    too_close: tuple[int, ...]
    """For each held-out reward, how many are too close to it, and to none before it."""
    constant: int
    """How many are the same in all rows, to within 1e-6."""


def outside(
    rewards: Sequence[RewardFunction],
    held_out: Sequence[Task | RewardOfFeatures],
    features: Features,
    limit: float = 0.9,
    goal_radii: float = 1.5,
) -> Screening:
    """Drops rewards that are constant or too close to a held-out one, which none is to a constant one.

    Args:
      held_out: tasks, drawn rewards or a user's.
      features: Features of the R states on which rewards are compared.
      limit: Pearson correlation over the rows from which on a reward is too close; negative ones never are.
      goal_radii: distance, in radii of a drawn goal, below which it is too close to a held-out one.
    """
    standard, goals = [], []
    for held in held_out:
        values = _standardised((task_reward(held) if isinstance(held, Task) else held)(features))
        goal = goal_of(held)
        standard.append(0.0 if values is None else values)
        goals.append(goal)
    kept: list[RewardFunction] = []
    too_close, constant = [0] * len(held_out), 0
    for reward in rewards:
        values = _standardised(reward(features))
        if values is None:
            constant += 1
            continue
        spacing = goal_radii * reward.terms[0].radius
        close = (
            np.mean(values * other) >= limit or (_distance(reward.goal, goal) < spacing)
            for other, goal in zip(standard, goals, strict=True)
        )
        first = next((index for index, is_close in enumerate(close) if is_close), None)
        if first is None:
            kept.append(reward)
        else:
            too_close[first] += 1
    return Screening(tuple(kept), tuple(too_close), constant)


def _standardised(values: np.ndarray) -> np.ndarray | None:
    """Values with mean 0 and variance 1; None if they are constant, to within 1e-6."""
    return (values - values.mean()) / values.std() if np.ptp(values) > 1e-6 else None


def goal_of(held: Task | RewardOfFeatures) -> tuple[float, ...] | None:
    """The position that a task or a reward function wants to be reached, if that is all."""
    if isinstance(held, Task):
        return TARGETS.get(held.domain.name, {}).get(held.name)
    return held.goal if isinstance(held, RewardFunction) else None


def _distance(goal: tuple[float, ...] | None, other: tuple[float, ...] | None) -> float:
    """Distance of two goals in metres; infinite if one is no goal."""
    return np.inf if goal is None or other is None else float(np.linalg.norm(np.subtract(goal, other)))
