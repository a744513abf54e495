"""Memory-efficient attention in plain XLA, for any platform (arXiv 2112.05682, 2205.14135).

Scores exist for one chunk of queries against one chunk of keys at a time, and pairs of chunks that
the mask leaves empty are skipped. Without a ring this is the paper's "memory efficient attention".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.chunks import ChunkGrid, default_chunk
from agentic_ring.attention.kernels.interface import Gradients, accumulate, backward_rows
from agentic_ring.attention.mask import HopMask
from agentic_ring.attention.softmax import SoftmaxState

State = TypeVar("State")


@dataclass(frozen=True)
class XlaKernel:
    """See ``Kernel``; serves every case.

    Attributes:
      query_chunk: queries a chunk; ``default_chunk`` of their number where absent.
      key_chunk: keys a chunk; likewise.
    """

    query_chunk: int | None = None
    key_chunk: int | None = None

    def _grid(self, q: jax.Array, k: jax.Array) -> ChunkGrid:
        query_chunk = self.query_chunk or default_chunk(q.shape[1])
        key_chunk = self.key_chunk or default_chunk(k.shape[1])
        return ChunkGrid(q.shape, k.shape, min(query_chunk, q.shape[1]), min(key_chunk, k.shape[1]))

    def forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: HopMask, *, scale: float
    ) -> SoftmaxState:
        """See ``Kernel.forward``."""
        grid = self._grid(q, k)
        keys, values = grid.split_keys(k), grid.split_keys(v)
        query_labels, key_labels, reachable = grid.split_mask(mask, k)

        def visit_queries(_, chunk):
            query, labels, reachable_keys = chunk

            def visit_keys(state, chunk):
                key, value, key_labels, reachable = chunk
                pair = HopMask(mask.spec, labels, key_labels)
                attend = lambda state: _attend(state, query, key, value, pair, scale)  # noqa: E731
                return _where_reachable(reachable, attend, state), None

            nothing = _RunningSoftmax(
                jnp.zeros_like(query, jnp.float32),
                jnp.full_like(query[..., 0], jnp.finfo(jnp.float32).min, jnp.float32),
                jnp.zeros_like(query[..., 0], jnp.float32),
            )
            state, _ = jax.lax.scan(visit_keys, nothing, (keys, values, key_labels, reachable_keys))
            return None, state.normalised()

        _, state = jax.lax.scan(visit_queries, None, (grid.split_queries(q), query_labels, reachable))
        return SoftmaxState(grid.join_queries(state.output), grid.join_rows(state.logsumexp))

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        output: jax.Array,
        logsumexp: jax.Array,
        d_output: jax.Array,
        mask: HopMask,
        *,
        scale: float,
    ) -> Gradients:
        """See ``Kernel.backward``."""
        grid = self._grid(q, k)
        queries, d_outputs = grid.split_queries(q), grid.split_queries(d_output.astype(q.dtype))
        totals, deltas = (grid.split_rows(x) for x in backward_rows(output, logsumexp, d_output))
        query_labels, key_labels, reachable = grid.split_mask(mask, k)
        reachable = None if reachable is None else reachable.T
        places = jnp.arange(len(queries))

        def visit_keys(dq, chunk):
            key, value, labels, reachable_queries = chunk

            def visit_queries(carry, chunk):
                dq, *d_key_value = carry
                place, query, total, delta, d_output, query_labels, reachable = chunk
                pair = HopMask(mask.spec, query_labels, labels)

                def differentiate(gradients):
                    hop = _attend_backward(query, key, value, total, delta, d_output, pair, scale)
                    return jax.tree.map(jnp.add, gradients, hop)

                unchanged = Gradients(jnp.zeros_like(query, jnp.float32), *d_key_value)
                d_query, *d_key_value = _where_reachable(reachable, differentiate, unchanged)
                # Outside the conditional, so that dq is updated in place and not copied by a branch.
                return (dq.at[place].add(d_query), *d_key_value), None

            nothing = (jnp.zeros_like(key, jnp.float32), jnp.zeros_like(value, jnp.float32))
            chunks = (places, queries, totals, deltas, d_outputs, query_labels, reachable_queries)
            (dq, dk, dv), _ = jax.lax.scan(visit_queries, (dq, *nothing), chunks)
            return dq, (dk, dv)

        chunks = (grid.split_keys(k), grid.split_keys(v), key_labels, reachable)
        dq, (dk, dv) = jax.lax.scan(visit_keys, jnp.zeros_like(queries, jnp.float32), chunks)
        return Gradients(grid.join_queries(dq), grid.join_keys(dk), grid.join_keys(dv))


class _RunningSoftmax(NamedTuple):
    """Softmax over the chunks seen so far, not divided yet.

    ``largest`` starts at the least float32 and not at -inf: the exponential of a masked score, -inf,
    less a finite number is exactly 0.
    """

    output: jax.Array  # [B, K, rows, H]: sum of exp(score - largest) * value
    largest: jax.Array  # [B, K, rows]
    total: jax.Array  # [B, K, rows]: sum of exp(score - largest)

    def normalised(self) -> SoftmaxState:
        empty = self.total == 0.0
        output = self.output / jnp.where(empty, 1.0, self.total)[..., None]
        return SoftmaxState(output, jnp.where(empty, -jnp.inf, self.largest + jnp.log(self.total)))


def _where_reachable(reachable: jax.Array | None, step: Callable[[State], State], state: State) -> State:
    """The state after ``step``, or the state itself at no cost; None is known to be reachable."""
    return step(state) if reachable is None else jax.lax.cond(reachable, step, lambda state: state, state)


def _attend(
    state: _RunningSoftmax, query: jax.Array, key: jax.Array, value: jax.Array, pair: HopMask, scale: float
) -> _RunningSoftmax:
    scores = accumulate("bkrh,bksh->bkrs", query, key) * scale
    if not pair.trivial:
        scores = jnp.where(_of_rows(pair.allowed(), query), scores, -jnp.inf)
    largest = jnp.maximum(state.largest, scores.max(axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    shrink = jnp.exp(state.largest - largest)
    output = accumulate("bkrs,bksh->bkrh", weights.astype(value.dtype), value)
    return _RunningSoftmax(
        state.output * shrink[..., None] + output, largest, state.total * shrink + weights.sum(axis=-1)
    )


def _attend_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    total: jax.Array,
    delta: jax.Array,
    d_output: jax.Array,
    pair: HopMask,
    scale: float,
) -> Gradients:
    # Keys by queries: two of the three products that use the scores then read them in memory order,
    # a fifth faster on CPUs than queries by keys.
    scores = accumulate("bksh,bkrh->bksr", key, query) * scale
    if not pair.trivial:
        allowed = _of_rows(pair.allowed(), query).swapaxes(-1, -2)
        scores = jnp.where(allowed, scores, -jnp.inf)
    probabilities = jnp.exp(scores - total[..., None, :])
    d_probabilities = accumulate("bksh,bkrh->bksr", value, d_output)
    d_scores = (probabilities * (d_probabilities - delta[..., None, :]) * scale).astype(query.dtype)
    return Gradients(
        dq=accumulate("bksr,bksh->bkrh", d_scores, key),
        dk=accumulate("bksr,bkrh->bksh", d_scores, query),
        dv=accumulate("bksr,bkrh->bksh", probabilities.astype(query.dtype), d_output),
    )


def _of_rows(allowed: jax.Array, query: jax.Array) -> jax.Array:
    """[B, chunk, S] -> [B, 1, rows, S]: the heads of a group are blocks of rows with one mask."""
    return jnp.tile(allowed, (1, query.shape[2] // allowed.shape[1], 1))[:, None]
