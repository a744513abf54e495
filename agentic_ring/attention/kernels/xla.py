"""Memory-efficient attention in plain XLA, for any platform (arXiv 2112.05682, 2205.14135).

Scores exist for one chunk of queries against one chunk of keys at a time, and pairs of chunks that
the mask leaves empty are skipped. Without a ring this is the paper's "memory efficient attention".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.interface import (
    Gradients,
    Saved,
    SoftmaxState,
    Tile,
    accumulate,
    state_dtype,
)
from agentic_ring.attention.mask import HopMask, TokenLabels
from agentic_ring.attention.scores import Scores

State = TypeVar("State")

MAX_CHUNK = 512
"""Longest default chunk: 512 x 512 float32 scores are 1 MiB and stay in a core's cache. Shorter chunks
lose to the loop's overhead, longer ones to memory traffic."""


def default_chunk(length: int, longest: int = MAX_CHUNK, halves: bool = True) -> int:
    """The chunk size for a run of ``length`` tokens: equal chunks, none longer than ``longest``.

    With ``halves`` their number is even: the two halves of a zigzag block, one early and one late in
    the sequence, then never share a chunk, and the half of the chunk pairs that is masked can be
    skipped. So can a quarter of the pairs on a causal diagonal.
    """
    parts = 2 if halves else 1
    return -(-length // (parts * -(-length // (parts * longest))))


@dataclass(frozen=True)
class ChunkGrid:
    """Chunks of queries by chunks of keys, of all rows and heads at once.

    A *stream* is one key head of one row of the batch with the N / K query heads that share it. Arrays
    are split into [chunks, streams, rows, H]. The rows of a chunk are its tokens, for queries once for
    each head of the group: grouped queries then cost no copy of the keys, and every product is one
    batched matrix product.

    Where a chunk does not divide T or S, the last is filled with padding.
    """

    query_shape: tuple[int, ...]  # [B, T, N, H]
    key_shape: tuple[int, ...]  # [B, S, K, H]
    query_chunk: int
    key_chunk: int

    @property
    def group(self) -> int:
        """N / K, query heads of a stream."""
        return self.query_shape[2] // self.key_shape[2]

    def split_queries(self, x: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [chunks, streams, N / K * query_chunk, H]."""
        batch, key_heads = self.key_shape[0], self.key_shape[2]
        x = _pad(x, self.query_chunk).reshape(batch, -1, self.query_chunk, key_heads, self.group, x.shape[3])
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(
            -1, batch * key_heads, self.group * self.query_chunk, x.shape[5]
        )

    def join_queries(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_queries``, padding cut off."""
        batch, length, heads, head_dim = self.query_shape[:3] + x.shape[-1:]
        x = x.reshape(-1, batch, self.key_shape[2], self.group, self.query_chunk, head_dim)
        return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, head_dim)[:, :length]

    def split_keys(self, x: jax.Array) -> jax.Array:
        """[B, S, K, H] -> [chunks, streams, key_chunk, H]."""
        batch, _, heads, head_dim = x.shape
        x = _pad(x, self.key_chunk).reshape(batch, -1, self.key_chunk, heads, head_dim)
        return x.transpose(1, 0, 3, 2, 4).reshape(-1, batch * heads, self.key_chunk, head_dim)

    def join_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_keys``, padding cut off."""
        batch, length, heads, _ = self.key_shape
        x = x.reshape(-1, batch, heads, self.key_chunk, x.shape[-1]).transpose(1, 0, 3, 2, 4)
        return x.reshape(batch, -1, heads, x.shape[-1])[:, :length]

    def split_mask(
        self, mask: HopMask, k: jax.Array, windows: jax.Array | None = None
    ) -> tuple[HopMask, jax.Array | None]:
        """The mask with labels [chunks, streams or 1, tokens], and which pairs of chunks may attend.

        The latter is bool [query chunks, key chunks], None for "all of them" where there are no labels.
        """
        queries, keys = self.query_shape[1], self.key_shape[1]
        query_padding, key_padding = -queries % self.query_chunk, -keys % self.key_chunk
        if mask.trivial and not key_padding:
            return mask, None
        if mask.trivial:
            query, key = (TokenLabels(segment_ids=jnp.zeros((1, n), jnp.int32)) for n in (queries, keys))
            mask = HopMask(mask.spec, query, key)
        # Tied to the keys, which change from hop to hop: from constants alone, JAX would compute the
        # masks of all pairs ahead of the loop over hops and keep them through it.
        mask, _ = jax.lax.optimization_barrier((mask.placed(queries, keys), k))
        query = self._split_labels(mask.query.pad(query_padding), self.query_chunk)
        key = self._split_labels(mask.key.pad(key_padding), self.key_chunk)
        query_bounds = jax.tree.map(lambda x: x[:, None], query.bounds())
        key_bounds = key.bounds()
        reachable = mask.reachable(query_bounds, key_bounds)
        if windows is not None:
            widest = jnp.tile(windows.reshape(-1, self.group).max(1), self.key_shape[0])
            reachable &= mask.nearer(widest, query_bounds, key_bounds)
        return replace(mask, query=query, key=key), reachable.any(-1)

    def stream_heads(self) -> tuple[jax.Array, jax.Array]:
        """The row of the batch [streams] and the query heads [streams, N / K] of each stream."""
        batch, heads = self.query_shape[0], jnp.arange(self.query_shape[2]).reshape(-1, self.group)
        return jnp.repeat(jnp.arange(batch), len(heads)), jnp.tile(heads, (batch, 1))

    def _split_labels(self, labels: TokenLabels, chunk: int) -> TokenLabels:
        """[B, T] -> [chunks, streams, chunk]; what the batch shares, [1, T], all streams share."""

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(len(x), -1, chunk).swapaxes(0, 1)
            return x if x.shape[1] == 1 else jnp.repeat(x, self.key_shape[2], axis=1)

        return jax.tree.map(split, labels)


def _pad(x: jax.Array, chunk: int) -> jax.Array:
    """Fills the last chunk of axis 1 with zeros."""
    padding = -x.shape[1] % chunk
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x


@dataclass(frozen=True)
class XlaKernel:
    """See ``Kernel``; serves every case.

    Chunks that are not given are ``default_chunk`` of the number of queries or keys, for queries shorter
    where many heads share a key head.
    """

    query_chunk: int | None = None
    key_chunk: int | None = None
    run: int | None = None
    """Tokens that stand together in the sequence, where an order of it over the ring cuts it into stripes;
    the default chunks do not reach from one into another, which lies far away."""
    all_streams: bool = False
    """Whether all rows and heads of a batch are worked on at once, as an accelerator needs to be full; else
    only as many as make ``MAX_CHUNK`` x ``MAX_CHUNK`` scores, which stay in the cache of a CPU's core."""

    def forward(self, tile: Tile) -> SoftmaxState:
        grid, parts = self._grid(tile)
        if parts.number == 1:
            return _forward(tile, grid)
        shape = tile.q.shape[:3]
        # Varying over the mesh axes that the queries vary over.
        zero = jnp.zeros_like(tile.q[0, 0, 0, 0], state_dtype(tile.q.dtype))
        shapes = (*shape, tile.v.shape[3]), shape
        whole = SoftmaxState(*(jnp.broadcast_to(zero, shape) for shape in shapes))
        return parts.loop(lambda number: _forward(parts.tile(tile, number), grid), whole)

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        grid, parts = self._grid(tile)
        if parts.number == 1:
            return _backward(tile, saved, grid)

        def backward(number: jax.Array) -> Gradients:
            part = jax.tree.map(lambda x: parts.of_queries(x, number), saved)
            return _backward(parts.tile(tile, number), part, grid)

        dtype = state_dtype(tile.q.dtype)
        return parts.loop(backward, Gradients(*(jnp.zeros_like(x, dtype) for x in tile[:3])))

    def _grid(self, tile: Tile) -> tuple[ChunkGrid, "_Parts"]:
        """The chunks of each part of the tile, and its parts."""
        q, k, mask = tile.q, tile.k, tile.mask
        batch, key_heads = k.shape[0], k.shape[2]
        group, halves = q.shape[2] // key_heads, not mask.trivial and self.run is None
        longest = max(16, MAX_CHUNK // group)
        query_chunk = self.query_chunk or default_chunk(self.run or q.shape[1], longest, halves)
        key_chunk = self.key_chunk or default_chunk(self.run or k.shape[1], MAX_CHUNK, halves)
        query_chunk, key_chunk = min(query_chunk, q.shape[1]), min(key_chunk, k.shape[1])
        rows, heads = batch, key_heads
        if not self.all_streams:
            most = max(1, MAX_CHUNK**2 // (group * query_chunk * key_chunk))
            heads = _largest_divisor(key_heads, most)
            rows = _largest_divisor(batch, most // heads) if heads == key_heads else 1
        query_shape = rows, q.shape[1], heads * group, q.shape[3]
        grid = ChunkGrid(query_shape, (rows, k.shape[1], heads, k.shape[3]), query_chunk, key_chunk)
        across = key_heads // heads
        return grid, _Parts(rows, heads, group, across, batch // rows * across)


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


@dataclass(frozen=True)
class _Parts:
    """Parts of a tile, some rows by some key heads, each cut out of the arrays when its turn comes.

    Chunked copies of all of them at once would be several times what the tile itself takes.
    """

    rows: int
    heads: int
    group: int
    across: int
    """Parts that the heads of a row are cut into."""
    number: int

    def loop(self, function: Callable[[jax.Array], State], whole: State) -> State:
        """The results of all parts, put in their places in ``whole``."""

        def step(number: jax.Array, whole: State) -> State:
            def place(x: jax.Array, part: jax.Array) -> jax.Array:
                heads = part.shape[2]
                return jax.lax.dynamic_update_slice(x, part, self._start(number, heads, x.ndim))

            return jax.tree.map(place, whole, function(number))

        return jax.lax.fori_loop(0, self.number, step, whole)

    def of_queries(self, x: jax.Array, number: jax.Array) -> jax.Array:
        """The part of an array [B, T, N, ...] of queries."""
        return self._cut(x, number, self.heads * self.group)

    def tile(self, tile: Tile, number: jax.Array) -> Tile:
        """The part of a tile."""
        q, k, v, mask, scores = tile
        row, _, head, _ = self._start(number, self.heads * self.group, 4)

        def of_heads(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, head, self.heads * self.group)

        def of_rows(x: jax.Array) -> jax.Array:
            return x if len(x) == 1 else jax.lax.dynamic_slice_in_dim(x, row, self.rows)

        return Tile(
            self.of_queries(q, number),
            self._cut(k, number, self.heads),
            self._cut(v, number, self.heads),
            jax.tree.map(of_rows, mask),
            scores.map_heads(of_heads).moved(row, head),
        )

    def _cut(self, x: jax.Array, number: jax.Array, heads: int) -> jax.Array:
        sizes = (self.rows, x.shape[1], heads, *x.shape[3:])
        return jax.lax.dynamic_slice(x, self._start(number, heads, x.ndim), sizes)

    def _start(self, number: jax.Array, heads: int, axes: int) -> tuple[Any, ...]:
        """Where a part begins in an array whose parts have ``heads`` heads."""
        return number // self.across * self.rows, 0, number % self.across * heads, *[0] * (axes - 3)


def _forward(tile: Tile, grid: ChunkGrid) -> SoftmaxState:
    """Attention of a part, whose chunks are those of the grid."""
    q, k, v, mask, scores = tile
    mask, reachable = grid.split_mask(mask, k, scores.windows)
    queries, keys, values = grid.split_queries(q), grid.split_keys(k), grid.split_keys(v)
    dtype = state_dtype(q.dtype)

    def visit_queries(_: None, chunk: tuple) -> tuple[None, SoftmaxState]:
        query, query_labels, reachable_keys = chunk

        def visit_keys(place: jax.Array, state: _RunningSoftmax) -> _RunningSoftmax:
            key, value, labels = jax.tree.map(lambda x: x[place], (keys, values, mask.key))
            pair = _Pair(replace(mask, query=query_labels, key=labels), scores, grid)
            return _attend_to_chunk(state, query, key, value, pair)

        zeros = jnp.zeros_like(query[..., 0], dtype)
        nothing = _RunningSoftmax(
            jnp.broadcast_to(zeros[..., None], (*zeros.shape, v.shape[3])),
            jnp.full_like(zeros, jnp.finfo(dtype).min),
            zeros,
        )
        return None, _visit(reachable_keys, len(keys), visit_keys, nothing).normalised()

    _, state = jax.lax.scan(visit_queries, None, (queries, mask.query, reachable))
    return SoftmaxState(
        grid.join_queries(state.output), grid.join_queries(state.logsumexp[..., None])[..., 0]
    )


def _backward(tile: Tile, saved: Saved, grid: ChunkGrid) -> Gradients:
    """The gradients of a part, likewise."""
    q, k, v, mask, scores = tile
    mask, reachable = grid.split_mask(mask, k, scores.windows)
    dtype = state_dtype(q.dtype)
    queries = _BackwardQueries(
        grid.split_queries(q),
        grid.split_queries(saved.d_output.astype(q.dtype)),
        *(grid.split_queries(x[..., None])[..., 0] for x in (saved.total, saved.delta)),
    )

    def visit_keys(dq: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        key, value, labels, reachable_queries = chunk

        def visit_queries(place: jax.Array, carry: tuple) -> tuple:
            dq, d_key, d_value = carry
            query, query_labels = jax.tree.map(lambda x: x[place], (queries, mask.query))
            pair = _Pair(replace(mask, query=query_labels, key=labels), scores, grid)
            more = _attend_backward(query, key, value, pair)
            return dq.at[place].add(more.dq), d_key + more.dk, d_value + more.dv

        nothing = (dq, jnp.zeros_like(key, dtype), jnp.zeros_like(value, dtype))
        dq, dk, dv = _visit(reachable_queries, len(queries.q), visit_queries, nothing)
        return dq, (dk, dv)

    nothing = jnp.zeros_like(queries.q.swapaxes(-1, -2), dtype)
    chunks = grid.split_keys(k), grid.split_keys(v), mask.key, None if reachable is None else reachable.T
    dq, (dk, dv) = jax.lax.scan(visit_keys, nothing, chunks)
    return Gradients(grid.join_queries(dq.swapaxes(-1, -2)), grid.join_keys(dk), grid.join_keys(dv))


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
    total: jax.Array  # [streams, rows], see ``Saved``
    delta: jax.Array  # [streams, rows]


class _Pair(NamedTuple):
    """One chunk of queries and one of keys: its mask and how its scores are computed."""

    mask: HopMask  # labels [streams or 1, tokens]
    scores: Scores
    grid: ChunkGrid

    def masked(self, scores: jax.Array, *, keys_first: bool) -> jax.Array:
        """Scores [streams, rows, S], or [streams, S, rows], with -inf where a query does not attend.

        What is added by head is added here.
        """
        if self.mask.trivial:
            return scores
        terms = self.scores.head_terms(self.mask, self.grid.stream_heads()[1])
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
        factors = dropout.factors(self.mask, *self.grid.stream_heads())
        factors = factors.reshape(len(factors), -1, factors.shape[-1])
        return x * (factors.swapaxes(-1, -2) if keys_first else factors)


def _visit(
    reachable: jax.Array | None, chunks: int, step: Callable[[jax.Array, State], State], state: State
) -> State:
    """The state after ``step`` with the place of each reachable chunk, bool [chunks]; None reaches all."""
    if reachable is None:
        return jax.lax.fori_loop(0, chunks, step, state)
    (places,) = jnp.nonzero(reachable, size=chunks, fill_value=0)
    return jax.lax.fori_loop(0, reachable.sum(), lambda number, state: step(places[number], state), state)


def _attend_to_chunk(
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
