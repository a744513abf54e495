"""Attention to a sharded cache: of a chunk of a long prompt, or of a few new tokens, and to each other.

For a chunk either the queries go to the keys, or the keys go round the ring to the queries ("pass-Q" and
"pass-KV" of arXiv 2411.01783). With the queries gathered, every device attends to its own shard of the cache
and to its own block of the chunk, and hands each device what it found for that device's queries:

    device             0          1          2          3
    has cached         S0         S1         S2         S3       any tokens, by position
    computes           q0 k0 v0   q1 k1 v1   q2 k2 v2   q3 k3 v3
    gathers            q0..q3     q0..q3     q0..q3     q0..q3
    attends to         S0, k0     S1, k1     S2, k2     S3, k3   all queries, masked by position
    receives for       q0         q1         q2         q3       one state from each, and merges them

That moves the chunk, whatever is cached; a ring moves what is cached, whatever the chunk. The shapes say
which is less: a ring where the chunk is a good part of the whole, the more so the more queries share a key.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentic_ring.attention.cache.kv_cache import EMPTY_SLOT, on_shards, ring_axis
from agentic_ring.attention.cache.shard_attention import (
    CachedAttentionInputs,
    attend_to_earlier_keys,
    attend_to_own_keys,
    attend_to_shard,
)
from agentic_ring.attention.kernels.interface import SoftmaxState, Tile, merge, merge_stacked
from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.scores import Scores
from agentic_ring.mesh import ShardingRules


def attend_chunk(
    inputs: CachedAttentionInputs,
    rules: ShardingRules,
    mask: MaskSpec = MaskSpec(causal=True),
    kernel: str = "auto",
    scores: Scores | None = None,
) -> jax.Array:
    """Attention of a chunk that is sharded over the ring to the cached tokens and to itself.

    With the queries gathered, a device receives the other devices' queries, B x C x N x H in the query's
    dtype less its own, and sends B x C x N x (H + 1) float32 numbers less its own, in one all-to-all;
    however much is cached. It then holds all of the chunk's queries at once: memory grows with C, not
    with what is cached. Where all slots of the cache, as they are stored, are less than that, they and
    the chunk's keys and values go round the ring instead.

    Args:
      inputs: the arrays, C sharded over the ring in any layout that the positions describe.
      kernel: the kernel for blocks that it serves, one of ``KERNELS``; the XLA kernel attends to the others.
      scores: scale and soft cap of scores; None is a scale of 1 / sqrt(H) and no cap.

    Returns:
      [B, C, N, H] in the query's dtype, sharded as the query; exactly 0 for padding.
    """
    how = _How(mask, scores or Scores(inputs.query.shape[-1] ** -0.5), kernel)

    def local(inputs: CachedAttentionInputs) -> jax.Array:
        ring = ring_axis(rules)
        state = attend_to_own_keys(_tile(inputs.query, inputs.positions, inputs, how), kernel)
        if ring.size == 1:
            state = reduce(merge, _of_shards(inputs.query, inputs.positions, inputs, how), state)
        else:
            attend = _around_ring if _ring_moves_less(inputs) else _at_shards
            state = attend(state, inputs, ring, how)
        return state.output.astype(inputs.query.dtype)

    specs = inputs.specs(rules, tokens="sequence")
    return on_shards(local, (specs,), specs.query)(inputs)


class _How(NamedTuple):
    """Which keys a query attends to, its scores, and the kernel to try."""

    mask: MaskSpec
    scores: Scores
    kernel: str


def _ring_moves_less(inputs: CachedAttentionInputs) -> bool:
    """Whether a device's keys are fewer bytes than its queries and, in float32, their attention.

    A hop of the ring sends the former once; the latter go to and from each of the other devices.
    """
    *_, heads, head_dim = inputs.query.shape
    gathered = inputs.positions.size * heads * (head_dim * inputs.query.dtype.itemsize + 4 * (head_dim + 1))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(_keys(inputs))) < gathered


def _keys(inputs: CachedAttentionInputs) -> Any:
    return inputs.key, inputs.value, inputs.positions, inputs.past, inputs.prefix


def _tile(query: jax.Array, positions: jax.Array, keys: CachedAttentionInputs, how: _How) -> Tile:
    """Queries against the chunk's keys that ``keys`` has."""
    pair = HopMask(how.mask, TokenLabels(positions), TokenLabels(keys.positions))
    return Tile(query, keys.key, keys.value, pair, how.scores)


def _of_shards(
    query: jax.Array, positions: jax.Array, keys: CachedAttentionInputs, how: _How
) -> Iterator[SoftmaxState]:
    """Attention to the cached tokens that ``keys`` has."""
    shards = (shard for shard in (keys.past, keys.prefix) if shard is not None)
    return (attend_to_shard(query, positions, shard, *how) for shard in shards)


def _around_ring(own: SoftmaxState, inputs: CachedAttentionInputs, ring: RingAxis, how: _How) -> SoftmaxState:
    """Adds to the attention to a device's ``own`` block that to all cached tokens and to the other blocks."""
    query, positions = inputs.query, inputs.positions

    def on_arrival(state: SoftmaxState, keys: Any) -> SoftmaxState:
        arrived = CachedAttentionInputs(query, *keys)
        state = merge(state, attend_to_earlier_keys(_tile(query, positions, arrived, how), how.kernel))
        return reduce(merge, _of_shards(query, positions, arrived, how), state)

    def hop(carry: tuple[SoftmaxState, Any], _: None) -> tuple[tuple[SoftmaxState, Any], None]:
        state, keys = carry
        following = ring.shift(keys, 1)
        return (on_arrival(state, keys), following), None

    following = ring.shift(_keys(inputs), 1)
    state = reduce(merge, _of_shards(query, positions, inputs, how), own)
    (state, keys), _ = jax.lax.scan(hop, (state, following), length=ring.size - 2)
    return on_arrival(state, keys)


def _at_shards(own: SoftmaxState, inputs: CachedAttentionInputs, ring: RingAxis, how: _How) -> SoftmaxState:
    """The same as ``_around_ring``, by gathering the queries and sending each device its part."""
    query, positions = jax.lax.all_gather((inputs.query, inputs.positions), ring.names, axis=1, tiled=True)
    first = ring.index() * inputs.positions.shape[1]

    def with_own(x: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, first, axis=1)

    # The device's own queries have attended to its block.
    others = with_own(positions, jnp.full_like(inputs.positions, EMPTY_SLOT))
    state = attend_to_earlier_keys(_tile(query, others, inputs, how), how.kernel)
    state = jax.tree.map(with_own, state, own)
    state = reduce(merge, _of_shards(query, positions, inputs, how), state)

    def exchange(x: jax.Array) -> jax.Array:
        by_owner = x.reshape(x.shape[0], ring.size, -1, *x.shape[2:]).swapaxes(0, 1)
        return ring.all_to_all(by_owner, split_axis=0, concat_axis=0)

    return merge_stacked(jax.tree.map(exchange, state))


def attend_new_tokens(
    inputs: CachedAttentionInputs,
    rules: ShardingRules,
    mask: MaskSpec = MaskSpec(causal=True),
    kernel: str = "auto",
    scores: Scores | None = None,
) -> jax.Array:
    """Attention of a few new tokens to the cached ones and to each other.

    Each device attends to its own shard of the cache. The results are merged by one all-reduce of
    B x C x N float32 numbers (the maxima) and one of B x C x N x (H + 1), however much is cached; a
    prefix adds none.

    Args:
      inputs: the arrays; those of the new tokens are the same on every device of the ring.
      kernel: as in ``attend_chunk``, where the new tokens are more than a few.
      scores: scale and soft cap of scores; None is a scale of 1 / sqrt(H) and no cap.

    Returns:
      [B, C, N, H] in the query's dtype; exactly 0 for padding.
    """
    how = _How(mask, scores or Scores(inputs.query.shape[-1] ** -0.5), kernel)

    def local(inputs: CachedAttentionInputs) -> jax.Array:
        query, positions = inputs.query, inputs.positions
        new = VanillaKernel().forward(_tile(query, positions, inputs, how))
        ring = ring_axis(rules).names
        if ring:
            query, positions = jax.lax.pcast((query, positions), ring, to="varying")
        earlier = reduce(merge, _of_shards(query, positions, inputs, how))
        earlier = _merge_over_ring(earlier, ring) if ring else earlier
        return merge(earlier, new).output.astype(inputs.query.dtype)

    specs = inputs.specs(rules, tokens=None)
    return on_shards(local, (specs,), specs.query)(inputs)


def _merge_over_ring(state: SoftmaxState, ring: tuple[str, ...]) -> SoftmaxState:
    """Joins what every device found in its own shard; see ``merge`` for the two-way case."""
    largest = jax.lax.pmax(state.logsumexp, ring)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weight = jnp.exp(state.logsumexp - largest)
    output, total = jax.lax.psum((state.output * weight[..., None], weight), ring)
    output = output / jnp.where(total == 0.0, 1.0, total)[..., None]
    return SoftmaxState(output, largest + jnp.log(total))
