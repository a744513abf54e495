"""Real episodes of uniform actions."""

from collections.abc import Sequence

import numpy as np

from agentic_ring.data.domains import Domain, task_named
from agentic_ring.data.recorded_environments import VectorEnvironments
from agentic_ring.data.trajectories import Episode


def uniform_episodes(
    domain: Domain, tasks: Sequence[str], action_repeat: int, decisions: int | None = None
) -> list[Episode]:
    """Returns one episode of each of the tasks; the environments' seeds are 0, 1, ..."""
    environments = VectorEnvironments(domain, [task_named(domain, name) for name in tasks], [], action_repeat)
    environments.reset(range(len(tasks)))
    generator = np.random.default_rng(0)
    for _ in range(decisions or environments.decisions):
        environments.step(generator.uniform(-1, 1, (len(tasks), domain.action_dim)))
    return environments.episodes()


def cut(episode: Episode, start: int, length: int) -> Episode:
    """A stretch of a real episode as an episode of its own; its physics fit its observations."""
    rows = slice(start, start + length + 1)
    arrays = {name: array[rows].copy() for name, array in vars(episode).items()}
    arrays["action"][0] = 0
    arrays["reward"][0] = 0
    return Episode(**arrays)
