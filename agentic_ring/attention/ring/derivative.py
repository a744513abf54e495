"""Attention of one device's queries to all blocks, with its derivative.

JAX saves q, k, v, the output and the logsumexp, and nothing of any hop, also under ``jax.checkpoint``
within a scan over layers. The backward works from the *global* output and logsumexp; with those of
one hop in their place dq and dk come out wrong while the forward and dv stay right.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from agentic_ring.attention.kernels.interface import backward_rows
from agentic_ring.attention.mask import TokenLabels
from agentic_ring.attention.ring.axis import vary_alike
from agentic_ring.attention.ring.hop import Block, Hop, Queries, Saved
from agentic_ring.attention.ring.transport import Transport
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, with_sinks

SAVED_NAMES = ("attention_output", "attention_logsumexp")
"""What a backward needs of the forward beside q, k and v: save these two by name in a policy of
``jax.checkpoint``, and attention is not computed again."""


@dataclass(frozen=True)
class Route:
    """The static part: how blocks come, and what is computed as they arrive."""

    transport: Transport
    hop: Hop
    axes: tuple[str, ...]
    """Mesh axes that the sequence is sharded over."""


def attend(
    route: Route,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    query: TokenLabels,
    key: TokenLabels,
    scores: Scores,
) -> jax.Array:
    """Attention of q [B, T, N, H] to the blocks k, v [B, S, K, H] of all devices.

    Args:
      route: see there.
      q, k, v: this device's.
      sinks: float [N], or None.
      query, key: labels of this device's tokens.
      scores: see there.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    # Hops mix them all, and the carries of a scan must keep their type. Done before the custom derivative,
    # so that JAX sums the gradient of an array that was the same on several devices.
    arrays = q, k, v, sinks, query, key, scores
    return _attend(route, *vary_alike(arrays, like=arrays, axes=route.axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    route: Route,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    query: TokenLabels,
    key: TokenLabels,
    scores: Scores,
) -> jax.Array:
    return _forward(route, q, k, v, sinks, query, key, scores).output.astype(q.dtype)


def _attend_forward(
    route: Route,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    query: TokenLabels,
    key: TokenLabels,
    scores: Scores,
) -> tuple[jax.Array, tuple]:
    state = _forward(route, q, k, v, sinks, query, key, scores)
    output = checkpoint_name(state.output.astype(q.dtype), SAVED_NAMES[0])
    logsumexp = checkpoint_name(state.logsumexp, SAVED_NAMES[1])
    return output, (q, k, v, sinks, query, key, scores, output, logsumexp)


# What does not depend on the inputs, such as masks, must not be worked out ahead and kept as residuals.
@functools.partial(jax.checkpoint, static_argnums=0)
def _forward(
    route: Route,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    query: TokenLabels,
    key: TokenLabels,
    scores: Scores,
) -> SoftmaxState:
    queries = Queries(q, query)
    state = route.transport.forward(
        Block(jnp.stack((k, v)), key),
        lambda block, origin: route.hop.forward(queries, block, origin, scores),
    )
    return state if sinks is None else with_sinks(state, sinks)


def _attend_backward(route: Route, residuals: tuple, d_output: jax.Array) -> tuple:
    q, k, v, sinks, query, key, scores, output, logsumexp = residuals
    queries, saved = Queries(q, query), Saved(output, logsumexp, d_output)
    dq, (dk, dv) = route.transport.backward(
        Block(jnp.stack((k, v)), key),
        lambda block, origin: route.hop.backward(queries, saved, block, origin, scores),
    )
    d_sinks = None if sinks is None else _d_sinks(sinks, saved)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None, None, None


def _d_sinks(sinks: jax.Array, saved: Saved) -> jax.Array:
    """A sink's value is 0, so that of its gradient probability * (0 - delta) is left."""
    total, delta = backward_rows(*saved)
    probability = jnp.exp(sinks.astype(jnp.float32) - total)
    return -(probability * delta).sum((0, 1)).astype(sinks.dtype)


_attend.defvjp(_attend_forward, _attend_backward)
