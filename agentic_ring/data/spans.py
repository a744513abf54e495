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


def shown_decisions(decisions: int, spans: int) -> np.ndarray:
    """Returns the numbers int [spans] of the decisions that known steps show, in the middle of each span.

    Raises:
      ConfigError: as ``span_edges``.
    """
    edges = span_edges(decisions, spans)
    return (edges[:-1] + edges[1:]) // 2


def span_fields(observation: np.ndarray, action: np.ndarray, reward: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the fields of the known steps [..., spans] that stand for whole trajectories, by name.

    Args:
      observation, action: [..., spans, O] and [..., spans, A] of the ``shown_decisions``, scaled as the model
        reads them.
      reward: [..., T] of all T decisions, scaled likewise.

    Raises:
      ConfigError: as ``span_edges``.
    """
    decisions, spans = reward.shape[-1], observation.shape[-2]
    edges, shown = span_edges(decisions, spans), shown_decisions(decisions, spans)
    total = np.add.reduceat(reward, edges[:-1], axis=-1, dtype=np.float64)
    return {
        "observation": observation,
        "action": action,
        "reward": reward[..., shown],
        "span_reward": (total / np.diff(edges)).astype(np.float32),
        "timestep": np.broadcast_to(np.arange(spans, dtype=np.int32), total.shape),
    }
