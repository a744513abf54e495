"""Attention to the part of a cache that one device holds. Nothing here communicates.

A few queries read the whole shard and compute little: what counts is to stream the cache at the
memory's speed. XLA's CPU compiler does so for products of batches of a few thousand slots; over the
whole shard at once it takes ten times as long, and an elementwise product with a sum twenty. Many
queries go through a blockwise kernel instead, so that no array of queries x slots exists.

A shard that is not in float32 is widened a slab at a time, in a scan, and never as a whole; so is any
shard for many queries. Slabs without a token that a query may attend to are skipped.

A GPU starts a dozen kernels for every slab, in ten times the time of reading it (measured on an H200). There
a few queries attend to the whole shard at once, and nothing is widened: see ``_product``.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.attention.cache.kv_cache import SLOTS_UNIT, CachedLayer, Stored, layer_specs
from agentic_ring.attention.kernels.interface import (
    SoftmaxState,
    Tile,
    empty_state,
    merge,
    merge_stacked,
    only_rows,
)
from agentic_ring.attention.kernels.registry import hardware_kernels, log_once, select_kernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.ring.collectives import vary_alike
from agentic_ring.attention.scores import Scores, soft_capped
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import ShardingRules, mesh_platform

LARGEST_SLAB = 4096
"""Slots taken at a time. For 4 heads of 64 float32 numbers it is 4 MiB of keys: 1024 slots lose to the
loop, 16384 no longer stay in a core's cache (measured)."""

FEW_ROWS = 32
"""Up to this many rows (queries x heads of a group), scores are kept for a whole float32 shard: as
much memory, at most, as a quarter of a shard with heads of 64. On a GPU they are kept for any shard, with
their weights in bfloat16: for one layer at a time, at most 1.3 times its shard in bfloat16."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedAttentionInputs:
    """The arrays of attention of new tokens to the cached ones and to each other.

    Attributes:
      query: queries of the new tokens, [B, C, N, H].
      key, value: their keys and values, [B, C, K, H].
      positions: int32 [B, C], counted in each row's own sequence; ``EMPTY_SLOT`` for padding tokens.
      past: one layer of the cache, sharded over the ring.
      prefix: what precedes ``past``: a cache of the same batch, or of batch 1 for what all rows have in
        common, read once for all rows (of a device: it is whole on each of those that the batch is spread
        over).
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    positions: jax.Array
    past: CachedLayer
    prefix: CachedLayer | None = None

    def specs(self, rules: ShardingRules, tokens: str | None) -> "CachedAttentionInputs":
        """The PartitionSpec of every array in its place; ``tokens`` is the logical axis of the new tokens."""
        queries: Any = rules.spec("batch", tokens, "heads", None)
        rules = rules.of_keys(self.key.shape[2])
        keys: Any = rules.spec("batch", tokens, "heads", None)
        positions: Any = rules.spec("batch", tokens)
        past, prefix = layer_specs(rules, self.past.keys.scales is not None), None
        if self.prefix is not None:
            shared = len(self.prefix.positions) == 1
            scaled = self.prefix.keys.scales is not None
            prefix = layer_specs(replace(rules, batch=()) if shared else rules, scaled)
        return CachedAttentionInputs(queries, keys, keys, positions, past, prefix)


def attend_to_shard(
    query: jax.Array,
    positions: jax.Array,
    shard: CachedLayer,
    mask: MaskSpec,
    scores: Scores,
    kernel: str = "auto",
) -> SoftmaxState:
    """Attention of queries to this device's shard.

    Args:
      query: [B, C, N, H].
      positions: int32 [B, C]; negative for padding.
      shard: its batch is B, or it is 1 and all rows of the queries share the shard: their queries
        become those of one row, and no copy of the shard is made.
      scores: scale and soft cap of scores.
      kernel: as in ``attend_chunk``, for many queries.

    Raises:
      ArgumentError: the queries are float64.
    """
    if query.dtype == jnp.float64:
        raise ArgumentError("queries of a cache are float64; cast them to float32, the widest a cache has")
    batch, tokens, heads, head_dim = query.shape
    query = query.reshape(shard.positions.shape[0], -1, heads, head_dim)
    positions = positions.reshape(query.shape[:2])
    few = query.shape[1] * heads // shard.keys.numbers.shape[1] <= FEW_ROWS
    attend = partial(_few_to_slab, scores) if few else partial(_many_to_slab, scores, kernel)
    slots = shard.positions.shape[1]
    at_once = shard.keys.numbers.dtype == jnp.float32 or mesh_platform() == "gpu"
    slab = slots if few and at_once else _piece(slots, LARGEST_SLAB)
    queries = TokenLabels(positions)
    keys = TokenLabels(shard.positions.reshape(len(shard.positions), -1, slab).swapaxes(0, 1))

    def visit(state: SoftmaxState, chunk: tuple) -> tuple[SoftmaxState, None]:
        first, labels, reachable = chunk

        def extend(state: SoftmaxState) -> SoftmaxState:
            # Sliced by index inside the branch, so that a skipped slab is not read.
            keys, values = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, first, slab, axis=2), (shard.keys, shard.values)
            )
            return merge(state, attend(query, keys, values, HopMask(mask, queries, labels)))

        return jax.lax.cond(reachable, extend, lambda state: state, state), None

    if slab == slots:
        state = attend(query, shard.keys, shard.values, HopMask(mask, queries, TokenLabels(shard.positions)))
    else:
        reachable = HopMask(mask, queries, keys).reachable(queries.bounds(), keys.bounds()).any(-1)
        firsts = slab * jnp.arange(slots // slab)
        state, _ = jax.lax.scan(visit, empty_state(query, head_dim), (firsts, keys, reachable))
    return SoftmaxState(*(x.reshape(batch, tokens, heads, *x.shape[3:]) for x in state))


def _piece(slots: int, largest: int) -> int:
    """Slots of an equal part of a shard; all of them where there are few, or no good part exists."""
    piece = math.gcd(slots, largest)
    return piece if piece >= SLOTS_UNIT else slots


def _many_to_slab(
    scores: Scores, kernel: str, query: jax.Array, keys: Stored, values: Stored, mask: HopMask
) -> SoftmaxState:
    key, value = (x.restored().astype(query.dtype).swapaxes(1, 2) for x in (keys, values))
    return attend_to_earlier_keys(Tile(query, key, value, mask, scores), kernel)


def _few_to_slab(
    scores: Scores, query: jax.Array, keys: Stored, values: Stored, mask: HopMask
) -> SoftmaxState:
    """Two products and a softmax for each of the slab's pieces, which are then merged."""
    batch, tokens, heads, head_dim = query.shape
    key_heads, slots = keys.numbers.shape[1:3]
    parts = 1 if query.dtype == jnp.bfloat16 else 3
    # Tensor cores lose bits in long sums. On an H200 the error with float32 queries was 4.6e-6 of the largest
    # number for pieces of 4096 slots and 1.2e-6 for 512, which took 2% longer.
    unit = SLOTS_UNIT if parts > 1 and mesh_platform() == "gpu" else LARGEST_SLAB
    group, piece = heads // key_heads, _piece(slots, unit)
    pieces = slots // piece

    def by_piece(x: jax.Array, *rest: int) -> jax.Array:
        return x.reshape(batch, key_heads, pieces, *rest)

    def apply_scales(x: jax.Array, stored: Stored) -> jax.Array:  # a number a slot instead of H
        return x if stored.scales is None else x * by_piece(stored.scales, 1, 1, piece)

    rows = query.astype(jnp.float32).reshape(batch, tokens, key_heads, group, head_dim)
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, key_heads, -1, head_dim)
    products = _product("bkrh,bkpsh->bkprs", rows, keys, piece, parts) * scores.scale
    capped = soft_capped(apply_scales(by_piece(products, tokens, group, piece), keys), scores.soft_cap)
    allowed = mask.allowed().reshape(-1, tokens, pieces, piece).swapaxes(1, 2)
    capped = jnp.where(allowed[:, None, :, :, None], capped, -jnp.inf)
    largest = capped.max(axis=-1)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weights = jnp.exp(capped - largest[..., None])
    total = weights.sum(axis=-1)
    weights = by_piece(apply_scales(weights, values), tokens * group, piece)
    output = _product("bkprs,bkpsh->bkprh", weights, values, piece, parts)
    output = by_piece(output, tokens, group, head_dim) / jnp.where(total == 0.0, 1.0, total)[..., None]
    state = SoftmaxState(
        output.transpose(2, 0, 3, 1, 4, 5).reshape(pieces, *query.shape),
        (largest + jnp.log(total)).transpose(2, 0, 3, 1, 4).reshape(pieces, *query.shape[:3]),
    )
    return merge_stacked(state)


def _product(equation: str, rows: jax.Array, stored: Stored, slots: int, parts: int) -> jax.Array:
    """Product in float32 of rows with what is stored, without its scales.

    The tensor cores of a GPU multiply bfloat16 and add in float32. A number of float32 is the sum of three
    ``parts`` of bfloat16, and one of int8 is a bfloat16: nothing is lost, and the shard is read as it is
    stored. Rows are [B, K, R, H] or [B, K, P, R, S], what is stored [B, K, P * S, H] with S ``slots``.
    """
    shape = (*stored.numbers.shape[:2], -1, slots, stored.numbers.shape[-1])
    if stored.numbers.dtype == jnp.float32 or mesh_platform() != "gpu":
        return jnp.einsum(equation, rows, stored.widened().reshape(shape))
    numbers = stored.narrowed().reshape(shape)
    if rows.ndim < numbers.ndim:
        # One product for each piece comes out in their order; one for all would be transposed (6% of a step).
        rows = jnp.broadcast_to(rows[:, :, None], (*numbers.shape[:3], *rows.shape[2:]))
        equation = equation.replace("bkrh", "bkprh")
    split = []
    for _ in range(parts):
        # Unlike a cast there and back, XLA does not leave this rounding out.
        part = jax.lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
        split.append(part.astype(jnp.bfloat16))
        rows -= part
    together = jnp.concatenate(split, axis=3)
    product = jnp.einsum(equation, together, numbers, preferred_element_type=jnp.float32)
    return product.reshape(*product.shape[:3], parts, -1, product.shape[-1]).sum(axis=3)


def attend_to_earlier_keys(tile: Tile, kernel: str) -> SoftmaxState:
    """Attention of queries to keys that are, in all likelihood, all before or all after each of them.

    It is right for any positions. The name of a ``kernel`` to try may be "auto".
    """
    query, key, bounds = tile.mask.query.positions, tile.mask.key.positions, tile.mask.key.bounds()
    after, before = query >= bounds.position_high[:, None], query < bounds.position_low[:, None]
    lengths = (key >= 0).sum(-1)
    at_the_end = (key >= 0) == (jnp.arange(key.shape[1]) < lengths[:, None])
    mask = HopMask(MaskSpec(causal=False), TokenLabels(), TokenLabels(), key_lengths=lengths)
    return _attend_by_place_or_position(tile, kernel, mask, after, (after | before).all() & at_the_end.all())


def attend_to_own_keys(tile: Tile, kernel: str) -> SoftmaxState:
    """Attention of queries to keys of the same tokens, which in all likelihood stand in order.

    It is right for any positions.
    """
    positions = tile.mask.query.positions
    this, following = positions[:, :-1], positions[:, 1:]
    in_order = (following < 0) | ((this >= 0) & (this < following))
    mask = HopMask(MaskSpec(causal=True), TokenLabels(), TokenLabels())
    return _attend_by_place_or_position(tile, kernel, mask, positions >= 0, in_order.all())


def _attend_by_place_or_position(
    tile: Tile, kernel: str, simple: HopMask, attends: jax.Array, is_simple: jax.Array
) -> SoftmaxState:
    """Attention by the tile's own mask, by the platform's own kernels if they serve.

    Those kernels take static masks, but which token stands where in a cache is known only at run time. In
    prefill nearly every block is one of two simple ones, which need no positions:

        earlier keys        x x x x - -        the chunk's own     x . . .
                            x x x x - -                            x x . .
          all queries come  x x x x - -          the same tokens,  x x x .
          after all keys                         in order          x x x x

    "-" is a slot without a token; each row has its own number of them. At run time the positions say whether
    a block ``is_simple``: then the queries that ``attends``, bool [B, T], is true of use the mask ``simple``.
    Else (tokens out of order, empty slots between others), where the mask has a window or a prefix, and where
    no other kernel serves the shapes, the XLA kernel attends by positions.
    """
    hardware = hardware_kernels(kernel)

    def by_positions() -> SoftmaxState:
        return vary_alike(select_kernel("xla").forward(tile), like=tile)

    def by_places() -> SoftmaxState:
        state = hardware.forward(tile._replace(mask=simple))
        return vary_alike(only_rows(state, attends), like=tile)

    if tile.mask.spec != MaskSpec(causal=True) or not hardware.candidates:
        return by_positions()
    try:
        return jax.lax.cond(is_simple, by_places, by_positions)
    except NotImplementedError as refusal:
        log_once(f"attention to a cache runs the xla kernel: {refusal}")
        return by_positions()
