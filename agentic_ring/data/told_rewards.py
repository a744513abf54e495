"""The reward functions that a model is trained on: drawn ones, without those like a task of the domain."""

import numpy as np

from agentic_ring.data.domains import Domain, Task
from agentic_ring.data.rewards.family import draw_rewards
from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.held_out import Screening, outside
from agentic_ring.data.told_chains import ToldDecisions

_COMPARED_ROWS = 50_000
"""Rows of the data, about, that are looked at."""


def draw_training_rewards(domain: Domain, data: ToldDecisions, count: int, seed: int) -> Screening:
    """Draws ``count`` reward functions; keeps those that are like no task of the domain, see ``outside``."""
    features, tasks = compared_features(domain, data), [Task(domain, name) for name in domain.tasks]
    return outside(draw_rewards(domain, features, count, seed), tasks, features)


def compared_features(domain: Domain, data: ToldDecisions) -> Features:
    """Features of episodes evenly from all over the data, on which reward functions are compared."""
    episodes = len(data.action)
    some = np.arange(0, episodes, max(1, episodes * domain.episode_steps // _COMPARED_ROWS))
    return data.features(some)


def left_out(screening: Screening, domain: Domain) -> str:
    """Says how many reward functions were left out, and why, such as ``27 like stand, 5 constant``."""
    numbers = zip(screening.too_close, domain.tasks, strict=True)
    parts = [f"{count} like {name}" for count, name in numbers if count]
    return ", ".join([*parts, f"{screening.constant} constant"])
