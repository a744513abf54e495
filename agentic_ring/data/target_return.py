"""The return that every trial aims at; it is chosen from the training data, never from results."""

import numpy as np

from agentic_ring.data.store import TrajectoryStore

TARGET_QUANTILE = 0.95


def target_return(store: TrajectoryStore, task: str, quantile: float = TARGET_QUANTILE) -> float:
    """Returns a quantile of the returns in ``task`` of all trajectories in which a policy acted."""
    return float(np.quantile(store.returns(task)[store.learnable], quantile))
