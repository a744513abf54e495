"""The reward functions that a model is trained on: drawn ones, without those like a task of the domain."""

from collections.abc import Sequence

import numpy as np

from agentic_ring.data.domains import Domain, Task
from agentic_ring.data.goal_distances import GoalDistances
from agentic_ring.data.rewards.family import GOAL_RADII, RewardFunction, draw_rewards, goal_reward
from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.held_out import Screening, goal_of, outside
from agentic_ring.data.rewards.tasks import POSITIONS, TARGETS, RewardOfFeatures
from agentic_ring.data.told_decisions import ToldDecisions

_COMPARED_ROWS = 50_000
"""Rows of the data, about, that are looked at."""
_HIDDEN_SEED = 41
_HIDDEN_FOR_EACH_TASK = 5
# Lower and upper bounds of the coordinates' sizes: the four rooms of the maze, and where Jaco's hand starts.
_HIDDEN_BOUNDS = {
    "point_mass_maze": ((0.05, 0.05), (0.27, 0.27)),
    "jaco": ((0.0, 0.0, 0.05), (0.2, 0.2, 0.35)),
}


def hidden_goals(domain: Domain) -> list[RewardFunction]:
    """Goals for evaluation that no model is trained on, beside the tasks; none where rewards are no goals.

    There are five in each quarter of the plane, as tasks are.
    """
    if domain.name not in POSITIONS:
        return []
    random = np.random.default_rng(_HIDDEN_SEED)
    quarters = np.ones((len(domain.tasks), len(POSITIONS[domain.name])))
    quarters[:, :2] = [np.sign(TARGETS[domain.name][name][:2]) for name in domain.tasks]
    each = np.repeat(quarters, _HIDDEN_FOR_EACH_TASK, axis=0)
    low, high = _HIDDEN_BOUNDS[domain.name]
    goals = each * random.uniform(low, high, each.shape)
    return [goal_reward(domain, goal) for goal in goals.tolist()]


def draw_training_rewards(domain: Domain, data: ToldDecisions, count: int, seed: int) -> Screening:
    """Draws ``count`` reward functions; keeps those like no task and no hidden goal, see ``outside``."""
    features, tasks = compared_features(domain, data), [Task(domain, name) for name in domain.tasks]
    return outside(draw_rewards(domain, features, count, seed), [*tasks, *hidden_goals(domain)], features)


def distances_to(
    domain: Domain, data: ToldDecisions, goals: Sequence[Task | RewardOfFeatures]
) -> GoalDistances | None:
    """Distances of the data's decisions from these goals; None in a domain whose rewards are no goals."""
    if domain.name not in POSITIONS:
        return None
    positions = data.positions(POSITIONS[domain.name])
    return GoalDistances(positions, np.array([goal_of(each) for each in goals]), GOAL_RADII[domain.name])


def compared_features(domain: Domain, data: ToldDecisions) -> Features:
    """Features of episodes evenly from all over the data, on which reward functions are compared."""
    episodes = len(data.action)
    some = np.arange(0, episodes, max(1, episodes * domain.episode_steps // _COMPARED_ROWS))
    return data.step_features(some)


def left_out(screening: Screening, domain: Domain) -> str:
    """Says how many reward functions were left out, and why, such as ``27 like stand, 5 constant``."""
    tasks = len(domain.tasks)
    numbers = [*zip(screening.too_close, domain.tasks, strict=False)]
    numbers.append((sum(screening.too_close[tasks:]), "a hidden goal"))
    parts = [f"{count} like {name}" for count, name in numbers if count]
    return ", ".join([*parts, f"{screening.constant} constant"])
