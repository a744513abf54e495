"""The interface of a kernel: attention of one block of queries to one of keys, forward and backward.

And the state of a softmax over a part of the keys, which a kernel returns, and the merge of such states.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from agentic_ring.attention.mask import HopMask
from agentic_ring.attention.scores import Scores


def state_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums over inputs of this dtype: float64 for float64, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


class SoftmaxState(NamedTuple):
    """Attention over some of the keys.

    Both are in ``state_dtype`` of the inputs: in bfloat16 the error would grow with every merge.
    """

    output: jax.Array
    """Softmax-weighted values over these keys, [B, T, N, V]; 0 where a query attends to none of them."""
    logsumexp: jax.Array
    """Log of the sum of exp(score) over these keys, [B, T, N]; -inf where a query attends to none of them."""


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
    weight_a, weight_b = jnp.exp(a.logsumexp - largest), jnp.exp(b.logsumexp - largest)
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


class Gradients(NamedTuple):
    """The contribution of one tile to the gradients, in ``state_dtype``, shaped like q, k and v."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


class Tile(NamedTuple):
    """One block of queries against one block of keys."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H], N a multiple of K
    v: jax.Array  # [B, S, K, V]
    mask: HopMask
    scores: Scores


class Saved(NamedTuple):
    """What a backward needs of the queries' attention to *all* keys."""

    output: jax.Array
    """Attention over all keys, [B, T, N, V]. With that over this tile's keys only in its place, dq and dk
    come out wrong while the forward and dv stay right."""
    logsumexp: jax.Array
    """Over all keys, in ``state_dtype``, [B, T, N]."""
    d_output: jax.Array
    """Gradient of the loss with respect to ``output``, [B, T, N, V]."""
    delta: jax.Array
    """In ``state_dtype``, [B, T, N]; the gradient of a score is its probability times that of the probability
    less this."""
    d_logsumexp: jax.Array | None = None
    """Gradient with respect to ``logsumexp``, part of ``delta``; None where it is no output."""

    @classmethod
    def of(
        cls, output: jax.Array, logsumexp: jax.Array, d_output: jax.Array, d_logsumexp: Any = None
    ) -> "Saved":
        """With the delta of arXiv 2205.14135, the inner product of output and its gradient."""
        delta = (output.astype(logsumexp.dtype) * d_output.astype(logsumexp.dtype)).sum(-1)
        if d_logsumexp is not None:
            delta -= jnp.where(jnp.isneginf(logsumexp), 0.0, d_logsumexp)
        return cls(output, logsumexp, d_output, delta, d_logsumexp)

    @property
    def total(self) -> jax.Array:
        """The logsumexp, +inf where it is -inf: exp(score - total) is 0 in a row that attends to nothing."""
        return jnp.where(jnp.isneginf(self.logsumexp), jnp.inf, self.logsumexp)


class Kernel(Protocol):
    """Two functions on one tile. They run on local arrays, inside ``jax.shard_map`` or outside it.

    A kernel is a frozen, hashable object. One that cannot serve a case raises NotImplementedError
    naming the case; ``kernel="auto"`` then tries the next.
    """

    def forward(self, tile: Tile) -> SoftmaxState:
        """Attention of the tile's queries to its keys, accumulated in ``state_dtype``.

        A query that attends to nothing gets output 0 and logsumexp -inf.
        """
        ...

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        """The contribution of the tile's keys to the gradients."""
        ...


def refuse(*reasons: tuple[bool, str]) -> None:
    """Raises a NotImplementedError with the first of these texts whose condition holds."""
    for applies, reason in reasons:
        if applies:
            raise NotImplementedError(reason)


def accumulate(subscripts: str, *arrays: jax.Array) -> jax.Array:
    """``jnp.einsum`` of arrays of the input dtype, summed and returned in its ``state_dtype``."""
    return jnp.einsum(subscripts, *arrays, preferred_element_type=state_dtype(jnp.result_type(*arrays)))
