"""The state of a softmax over a part of the keys, and the merge of two such states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def state_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums over inputs of this dtype: float64 for float64, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


class SoftmaxState(NamedTuple):
    """Attention over some of the keys.

    Both are in ``state_dtype`` of the inputs: in bfloat16 the error would grow with every merge.

    Attributes:
      output: softmax-weighted values over these keys, [B, T, N, V]; 0 where a query attends to none
        of them.
      logsumexp: log of the sum of exp(score) over these keys, [B, T, N]; -inf where a query attends
        to none of them.
    """

    output: jax.Array
    logsumexp: jax.Array


def empty_state(q: jax.Array, value_dim: int) -> SoftmaxState:
    """The state of queries [B, T, N, H] before any key, for values of ``value_dim`` numbers."""
    zeros = jnp.zeros_like(q[..., 0], state_dtype(q.dtype))
    output = jnp.broadcast_to(zeros[..., None], (*zeros.shape, value_dim))
    return SoftmaxState(output, jnp.full_like(zeros, -jnp.inf))


def only_rows(state: SoftmaxState, kept: jax.Array) -> SoftmaxState:
    """The state, empty for all queries but those of ``kept``, bool [B, T] or [B, 1]."""
    kept = kept[..., None]
    return SoftmaxState(
        jnp.where(kept[..., None], state.output, 0.0), jnp.where(kept, state.logsumexp, -jnp.inf)
    )


def with_sinks(state: SoftmaxState, sinks: jax.Array) -> SoftmaxState:
    """The state after one more key a head, of score ``sinks`` [N] and value 0 (arXiv 2508.10925)."""
    logsumexp = jnp.logaddexp(state.logsumexp, sinks.astype(state.logsumexp.dtype))
    # Of nothing but a sink that is switched off, -inf, there is no sum to divide by.
    total = jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp)
    return SoftmaxState(state.output * jnp.exp(state.logsumexp - total)[..., None], logsumexp)


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Attention over the union of two disjoint sets of keys.

    The larger of the two sums scales both, so no exponential overflows; where both are empty the
    scale is 0 instead of -inf, whose difference with itself would be NaN.
    """
    largest = jnp.maximum(a.logsumexp, b.logsumexp)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weight_a = jnp.exp(a.logsumexp - largest)
    weight_b = jnp.exp(b.logsumexp - largest)
    total = weight_a + weight_b
    divisor = jnp.where(total == 0.0, 1.0, total)
    output = a.output * (weight_a / divisor)[..., None] + b.output * (weight_b / divisor)[..., None]
    return SoftmaxState(output, largest + jnp.log(total))


def merge_stacked(states: SoftmaxState) -> SoftmaxState:
    """``merge`` of any number of states, stacked along a leading axis."""
    largest = states.logsumexp.max(axis=0)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weights = jnp.exp(states.logsumexp - largest)
    total = weights.sum(axis=0)
    output = (states.output * weights[..., None]).sum(axis=0)
    return SoftmaxState(output / jnp.where(total == 0.0, 1.0, total)[..., None], largest + jnp.log(total))
