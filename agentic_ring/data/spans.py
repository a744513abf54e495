"""Spans of consecutive decisions, each of which one known step of an ``AgenticTransformer`` stands for."""

import numpy as np

from agentic_ring.errors import ConfigError


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
    observation: np.ndarray, action: np.ndarray, reward: np.ndarray, spans: int
) -> dict[str, np.ndarray]:
    """Returns the fields of the known steps [..., spans] that stand for whole trajectories, by name.

    Args:
      observation, action, reward: [..., T, O], [..., T, A] and [..., T] of the T decisions, scaled as the
        model reads them. A known step shows the decision in the middle of its span.

    Raises:
      ConfigError: as ``span_edges``.
    """
    edges = span_edges(reward.shape[-1], spans)
    shown = middle_decisions(reward.shape[-1], spans)
    total = np.add.reduceat(reward, edges[:-1], axis=-1, dtype=np.float64)
    return {
        "observation": observation[..., shown, :],
        "action": action[..., shown, :],
        "reward": reward[..., shown],
        "span_reward": (total / np.diff(edges)).astype(np.float32),
        "timestep": np.broadcast_to(np.arange(spans, dtype=np.int32), total.shape),
    }
