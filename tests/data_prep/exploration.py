"""Real episodes of uniform actions."""

from collections.abc import Sequence

import numpy as np

from agentic_ring.data.domains import Domain, task_named
from agentic_ring.data.trajectories import Episode
from data_prep.collection_environments import VectorEnvironments


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
