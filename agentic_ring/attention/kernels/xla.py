"""Memory-efficient attention in plain XLA, for any platform (arXiv 2112.05682, 2205.14135).

Scores exist for one chunk of queries against one chunk of keys at a time, and pairs of chunks that
the mask leaves empty are skipped. Without a ring this is the paper's "memory efficient attention".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.chunks import MAX_CHUNK, ChunkGrid, default_chunk
from agentic_ring.attention.kernels.interface import Gradients, Saved, Tile, accumulate, backward_rows
from agentic_ring.attention.mask import HopMask
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, state_dtype

State = TypeVar("State")


@dataclass(frozen=True)
class XlaKernel:
    """See ``Kernel``; serves every case.

    Attributes:
      query_chunk: queries a chunk; where absent, ``default_chunk`` of their number, shorter where many
        heads share a key head.
      key_chunk: keys a chunk; ``default_chunk`` of their number where absent.
      run: tokens that stand together in the sequence, where an order of it over the ring cuts it into
        stripes; the default chunks do not reach from one into another, which lies far away.
      all_streams: whether all rows and heads of a batch are worked on at once, as an accelerator needs
        to be full; else only as many as make ``MAX_CHUNK`` x ``MAX_CHUNK`` scores, which stay in the
        cache of a CPU's core.
    """

    query_chunk: int | None = None
    key_chunk: int | None = None
    run: int | None = None
    all_streams: bool = False

    def _grid(self, q: jax.Array, k: jax.Array, mask: HopMask) -> ChunkGrid:
        group, halves = q.shape[2] // k.shape[2], not mask.trivial and self.run is None
        longest = max(16, MAX_CHUNK // group)
        query_chunk = self.query_chunk or default_chunk(self.run or q.shape[1], longest, halves)
        key_chunk = self.key_chunk or default_chunk(self.run or k.shape[1], MAX_CHUNK, halves)
        query_chunk, key_chunk = min(query_chunk, q.shape[1]), min(key_chunk, k.shape[1])
        streams = k.shape[0] * k.shape[2]
        if not self.all_streams:
            most = max(1, MAX_CHUNK**2 // (group * query_chunk * key_chunk))
            streams = next(n for n in range(min(most, streams), 0, -1) if streams % n == 0)
        return ChunkGrid(q.shape, k.shape, query_chunk, key_chunk, streams)

    def forward(self, tile: Tile) -> SoftmaxState:
        """See ``Kernel.forward``."""
        q, k, v, mask, scores = tile
        grid = self._grid(q, k, mask)
        mask, reachable = grid.split_mask(mask, k, scores.windows)
        dtype = state_dtype(q.dtype)

        def take_turn(_, turn):
            queries, keys, values, mask, reachable, streams = turn

            def visit_queries(_, chunk):
                query, query_labels, reachable_keys = chunk

                def visit_keys(place, state):
                    key, value, labels = jax.tree.map(lambda x: x[place], (keys, values, mask.key))
                    pair = _Pair(replace(mask, query=query_labels, key=labels), scores, grid, streams)
                    return _attend(state, query, key, value, pair)

                zeros = jnp.zeros_like(query[..., 0], dtype)
                nothing = _RunningSoftmax(
                    jnp.broadcast_to(zeros[..., None], (*zeros.shape, v.shape[3])),
                    jnp.full_like(zeros, jnp.finfo(dtype).min),
                    zeros,
                )
                state = _visit(reachable_keys, len(keys), visit_keys, nothing)
                return None, state.normalised()

            return None, jax.lax.scan(visit_queries, None, (queries, mask.query, reachable))[1]

        turns = (
            grid.split_queries(q),
            grid.split_keys(k),
            grid.split_keys(v),
            mask,
            reachable,
            grid.stream_numbers(),
        )
        _, state = jax.lax.scan(take_turn, None, turns)
        return SoftmaxState(grid.join_queries(state.output), grid.join_rows(state.logsumexp))

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        """See ``Kernel.backward``."""
        q, k, v, mask, scores = tile
        grid = self._grid(q, k, mask)
        mask, reachable = grid.split_mask(mask, k, scores.windows)
        dtype = state_dtype(q.dtype)

        def take_turn(_, turn):
            queries, keys, values, mask, reachable, streams = turn
            reachable = None if reachable is None else reachable.T

            def visit_keys(dq, chunk):
                key, value, labels, reachable_queries = chunk

                def visit_queries(place, carry):
                    dq, d_key, d_value = carry
                    query, query_labels = jax.tree.map(lambda x: x[place], (queries, mask.query))
                    pair = _Pair(replace(mask, query=query_labels, key=labels), scores, grid, streams)
                    more = _attend_backward(query, key, value, pair)
                    return dq.at[place].add(more.dq), d_key + more.dk, d_value + more.dv

                nothing = (jnp.zeros_like(key, dtype), jnp.zeros_like(value, dtype))
                dq, dk, dv = _visit(reachable_queries, len(queries.q), visit_queries, (dq, *nothing))
                return dq, (dk, dv)

            nothing = jnp.zeros_like(queries.q.swapaxes(-1, -2), dtype)
            dq, (dk, dv) = jax.lax.scan(visit_keys, nothing, (keys, values, mask.key, reachable))
            return None, Gradients(dq.swapaxes(-1, -2), dk, dv)

        total, delta = backward_rows(saved)
        queries = _BackwardQueries(
            grid.split_queries(q),
            grid.split_queries(saved.d_output.astype(q.dtype)),
            grid.split_rows(total),
            grid.split_rows(delta),
        )
        turns = (queries, grid.split_keys(k), grid.split_keys(v), mask, reachable, grid.stream_numbers())
        _, (dq, dk, dv) = jax.lax.scan(take_turn, None, turns)
        return Gradients(grid.join_queries(dq), grid.join_keys(dk), grid.join_keys(dv))


class _RunningSoftmax(NamedTuple):
    """Softmax over the chunks seen so far, not divided yet.

    ``largest`` starts at the least finite number and not at -inf: the exponential of a masked score, -inf,
    less a finite number is exactly 0.
    """

    output: jax.Array  # [streams, rows, V]: sum of exp(score - largest) * value
    largest: jax.Array  # [streams, rows]
    total: jax.Array  # [streams, rows]: sum of exp(score - largest)

    def normalised(self) -> SoftmaxState:
        empty = self.total == 0.0
        output = self.output / jnp.where(empty, 1.0, self.total)[..., None]
        return SoftmaxState(output, jnp.where(empty, -jnp.inf, self.largest + jnp.log(self.total)))


class _BackwardQueries(NamedTuple):
    """The arrays of the queries that the backward needs, in chunks."""

    q: jax.Array  # [streams, rows, H]
    d_output: jax.Array  # [streams, rows, V]
    total: jax.Array  # [streams, rows], see ``backward_rows``
    delta: jax.Array  # [streams, rows]


class _Pair(NamedTuple):
    """One chunk of queries and one of keys: its mask and how its scores are computed."""

    mask: HopMask  # labels [streams or 1, tokens]
    scores: Scores
    grid: ChunkGrid
    streams: jax.Array

    def masked(self, scores: jax.Array, *, keys_first: bool) -> jax.Array:
        """Scores [streams, rows, S], or [streams, S, rows], with -inf where a query does not attend.

        What is added by head is added here.
        """
        if self.mask.trivial:
            return scores
        terms = self.scores.head_terms(self.mask, self._heads)
        if terms is not None:
            terms = terms.reshape(len(terms), -1, terms.shape[-1]).astype(scores.dtype)
            scores += terms.swapaxes(-1, -2) if keys_first else terms
        # The heads of a group are blocks of rows with one mask.
        allowed = jnp.tile(self.mask.allowed(), (1, self.grid.group, 1))
        return jnp.where(allowed.swapaxes(-1, -2) if keys_first else allowed, scores, -jnp.inf)

    def dropped(self, x: jax.Array, *, keys_first: bool) -> jax.Array:
        """``x``, likewise, with what dropout does to probabilities."""
        dropout = self.scores.dropout
        if dropout is None:
            return x
        factors = dropout.factors(self.mask, self.streams // self.grid.key_shape[2], self._heads)
        factors = factors.reshape(len(factors), -1, factors.shape[-1])
        return x * (factors.swapaxes(-1, -2) if keys_first else factors)

    @property
    def _heads(self) -> jax.Array:
        """The query heads [streams, N / K] of each stream."""
        group = self.grid.group
        return (self.streams % self.grid.key_shape[2] * group)[:, None] + jnp.arange(group)


def _visit(
    reachable: jax.Array | None, chunks: int, step: Callable[[jax.Array, State], State], state: State
) -> State:
    """The state after ``step`` with the place of each reachable chunk, bool [chunks]; None reaches all."""
    if reachable is None:
        return jax.lax.fori_loop(0, chunks, step, state)
    (places,) = jnp.nonzero(reachable, size=chunks, fill_value=0)
    return jax.lax.fori_loop(0, reachable.sum(), lambda number, state: step(places[number], state), state)


def _attend(
    state: _RunningSoftmax, query: jax.Array, key: jax.Array, value: jax.Array, pair: _Pair
) -> _RunningSoftmax:
    scores = pair.masked(pair.scores.from_products(accumulate("xrh,xsh->xrs", query, key)), keys_first=False)
    largest = jnp.maximum(state.largest, scores.max(axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    shrink = jnp.exp(state.largest - largest)
    dropped = pair.dropped(weights, keys_first=False)
    output = accumulate("xrs,xsh->xrh", dropped.astype(value.dtype), value)
    return _RunningSoftmax(
        state.output * shrink[..., None] + output, largest, state.total * shrink + weights.sum(axis=-1)
    )


def _attend_backward(query: _BackwardQueries, key: jax.Array, value: jax.Array, pair: _Pair) -> Gradients:
    """Gradients of one pair, that of the queries transposed: [streams, H, rows].

    Keys by queries, and dq as its transpose: so every product reads its large factor in memory order.
    With queries by keys, dk and dv would read it across, at a third of the speed on CPUs.
    """
    unmasked = pair.scores.from_products(accumulate("xsh,xrh->xsr", key, query.q))
    masked = pair.masked(unmasked, keys_first=True)
    probabilities = jnp.exp(masked - query.total[:, None])
    d_probabilities = pair.dropped(accumulate("xsh,xrh->xsr", value, query.d_output), keys_first=True)
    d_scores = probabilities * (d_probabilities - query.delta[:, None])
    d_products = pair.scores.gradient(d_scores, unmasked).astype(query.q.dtype)
    dropped = pair.dropped(probabilities, keys_first=True).astype(query.q.dtype)
    return Gradients(
        dq=accumulate("xhs,xsr->xhr", key.swapaxes(-1, -2), d_products),
        dk=accumulate("xsr,xrh->xsh", d_products, query.q),
        dv=accumulate("xsr,xrh->xsh", dropped, query.d_output),
    )
