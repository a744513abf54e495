"""Spans of consecutive decisions, each of which one known step of an ``AgenticTransformer`` stands for."""

from itertools import pairwise
from typing import Literal

import numpy as np

from agentic_ring.errors import ConfigError

Shown = Literal["middle", "best"]
"""Which decision of its span a known step shows: the one in the middle, or the first of those with the
highest reward, if it is higher than in the middle."""


def span_edges(decisions: int, spans: int) -> np.ndarray:
    """Returns the edges int [spans + 1] of spans whose lengths differ by at most one decision.

    Span ``i`` has the decisions from ``edges[i]`` to before ``edges[i + 1]``.

    Raises:
      ConfigError: there are not 1 to ``decisions`` spans.
    """
    if not 1 <= spans <= decisions:
        raise ConfigError(
            f"spans is {spans} in a trajectory of {decisions} decisions; choose 1 to {decisions}"
        )
    return np.arange(spans + 1) * decisions // spans


def middle_decisions(decisions: int, spans: int) -> np.ndarray:
    """Returns the numbers int [spans] of the decisions in the middle of each span.

    Raises:
      ConfigError: as ``span_edges``.
    """
    edges = span_edges(decisions, spans)
    return (edges[:-1] + edges[1:]) // 2


def span_fields(
    observation: np.ndarray, action: np.ndarray, reward: np.ndarray, spans: int, shown: Shown = "middle"
) -> dict[str, np.ndarray]:
    """Returns the fields of the known steps [..., spans] that stand for whole trajectories, by name.

    Args:
      observation, action, reward: [..., T, O], [..., T, A] and [..., T] of the T decisions, scaled as the
        model reads them.

    Raises:
      ConfigError: as ``span_edges``.
    """
    edges = span_edges(reward.shape[-1], spans)
    at = np.broadcast_to(middle_decisions(reward.shape[-1], spans), (*reward.shape[:-1], spans))
    if shown == "best":
        first = [a + reward[..., a:b].argmax(axis=-1) for a, b in pairwise(edges.tolist())]
        best = np.stack(first, axis=-1)
        higher = np.take_along_axis(reward, best, -1) > np.take_along_axis(reward, at, -1)
        at = np.where(higher, best, at)
    total = np.add.reduceat(reward, edges[:-1], axis=-1, dtype=np.float64)
    return {
        "observation": np.take_along_axis(observation, at[..., None], axis=-2),
        "action": np.take_along_axis(action, at[..., None], axis=-2),
        "reward": np.take_along_axis(reward, at, axis=-1),
        "span_reward": (total / np.diff(edges)).astype(np.float32),
        "timestep": np.broadcast_to(np.arange(spans, dtype=np.int32), total.shape),
    }
