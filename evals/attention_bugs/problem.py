"""One attention call with its mask written out, and its exact result in NumPy.

The mask is given twice: as the arguments that an implementation takes (segment ids, window, causal) and as
the T x S array that they stand for. So an argument that an implementation ignores is an error of its result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from agentic_ring.attention import Strategy

PADDING = -1
"""Segment id of a padding token."""


@dataclass(frozen=True)
class Options:
    """The static part of a call.

    Attributes:
      ring: devices that share the sequence.
      strategy: how they share it.
      causal: a query attends to no later key.
      window: keys that a query attends to, itself and those before it; None for all.
      dropout_rate: share of the probabilities that is dropped.
    """

    ring: int
    strategy: Strategy = "ring"
    causal: bool = True
    window: int | None = None
    dropout_rate: float = 0.0


class Arrays(NamedTuple):
    """The arrays of a call; q, k, v and d_output have one dtype. Queries are those of the last T tokens."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, N, H]
    v: Any  # [B, S, N, H]
    d_output: Any  # [B, T, N, H]: gradient of the output
    segment_ids: Any = None  # int32 [B, T]; ``PADDING`` for padding
    sinks: Any = None  # float32 [N]


class Result(NamedTuple):
    """Attention and its gradients, float64; d_sinks is None without sinks."""

    output: Any
    dq: Any
    dk: Any
    dv: Any
    d_sinks: Any = None


Attend = Callable[[Options, Arrays], Result]
"""An implementation; raises ``UnsupportedError`` for what it cannot compute."""


def random_arrays(tokens: int, heads: int = 2, head_dim: int = 8) -> Arrays:
    """Standard normal float32 arrays of one row, the same at every call."""
    random = np.random.default_rng(tokens)
    return Arrays(*(random.normal(size=(1, tokens, heads, head_dim)).astype(np.float32) for _ in range(4)))


def allowed_pairs(options: Options, tokens: int, documents: np.ndarray | None = None) -> np.ndarray:
    """Bool [T, T]: which query attends to which key of as many tokens.

    Args:
      documents: int [T], the document of each token, ``PADDING`` for padding; one document if absent.
    """
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None]
    allowed = np.ones((tokens, tokens), bool)
    if options.causal:
        allowed &= key <= query
    if options.window is not None:
        allowed &= query - key < options.window
    if documents is not None:
        allowed &= (documents[:, None] == documents[None]) & (documents >= 0)
    return allowed


def exact(arrays: Arrays, allowed: np.ndarray) -> Result:
    """Attention and its gradients in float64 NumPy, from the formulas of a softmax; 0 in empty rows.

    Args:
      allowed: bool [T, S], which query attends to which key.
    """
    q, k, v, d_output = (np.asarray(x, np.float64)[0].swapaxes(0, 1) for x in arrays[:4])  # [N, T, H]
    scale = q.shape[-1] ** -0.5
    sinks = np.full(len(q), -np.inf) if arrays.sinks is None else np.asarray(arrays.sinks, np.float64)
    scores = np.where(allowed, q @ k.swapaxes(1, 2) * scale, -np.inf)
    largest = np.maximum(scores.max(-1, keepdims=True), sinks[:, None, None])
    largest = np.where(np.isneginf(largest), 0.0, largest)
    weights, sink_weights = np.exp(scores - largest), np.exp(sinks[:, None, None] - largest)
    total = weights.sum(-1, keepdims=True) + sink_weights
    total = np.where(total == 0, 1.0, total)
    probabilities, sink_probabilities = weights / total, sink_weights / total
    output = probabilities @ v
    delta = (d_output * output).sum(-1, keepdims=True)
    d_scores = probabilities * (d_output @ v.swapaxes(1, 2) - delta) * scale
    gradients = d_scores @ k, d_scores.swapaxes(1, 2) @ q, probabilities.swapaxes(1, 2) @ d_output
    output, dq, dk, dv = (x.swapaxes(0, 1)[None] for x in (output, *gradients))
    d_sinks = None if arrays.sinks is None else -(sink_probabilities * delta).sum((1, 2))
    return Result(output, dq, dk, dv, d_sinks)
