"""A key/value cache sharded along the sequence, and decoding against it.

No key or value ever moves between devices. New tokens go to the devices in turn, whole calls at a
time, so the shards fill evenly; each device attends to its own shard, and one small reduction over
(output, logsumexp) merges what the devices found. A slot's place therefore says nothing about its
token: every slot carries its position, and -1 marks an empty one.

    device      0            1            2            3
    prefill     0 1 2 3      4 5 6 7      8 9 10 11    12 13 14 15     (or any other layout)
    call 0      16 17
    call 1                   18 19
    call 4      24 25  ...
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, merge
from agentic_ring.mesh import ShardingRules, ambient_axis_size

EMPTY_SLOT = -1
"""Position of a slot that holds no token, and of a token that is only padding."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "positions", "filled", "calls"],
    meta_fields=[],
)
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, and where their tokens stand.

    Attributes:
      keys, values: [layers, B, K, S, H], S sharded over the ring. A head's slots lie together, as
        decoding reads them; the other order would be transposed, whole, at every step.
      positions: int32 [B, S]; ``EMPTY_SLOT`` where there is no token. All layers share them.
      filled: int32 [ring], the slots in use on each device.
      calls: int32 scalar, how many calls of ``append`` there were; it picks the next device.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    filled: jax.Array
    calls: jax.Array


def cache_specs(rules: ShardingRules) -> KVCache:
    """The PartitionSpec of every array of a cache, in a cache's place."""
    entries: Any = rules.spec("layer", "batch", "heads", "sequence", None)
    positions: Any = rules.spec("batch", "sequence")
    filled: Any = rules.spec("sequence")
    calls: Any = PartitionSpec()
    return KVCache(entries, entries, positions, filled, calls)


def slots_needed(prefill_tokens: int, calls: int, tokens_per_call: int, ring: int) -> int:
    """Capacity for a prefill (padded to the ring) followed by ``calls`` appends."""
    return ring * (-(-prefill_tokens // ring) + -(-calls // ring) * tokens_per_call)


def empty_cache(
    layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype: jnp.dtype, ring: int
) -> KVCache:
    """A cache without tokens. ``capacity`` is the slots of all ``ring`` devices together."""
    shape = (layers, batch, kv_heads, capacity, head_dim)
    return KVCache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        positions=jnp.full((batch, capacity), EMPTY_SLOT, jnp.int32),
        filled=jnp.zeros(ring, jnp.int32),
        calls=jnp.zeros((), jnp.int32),
    )


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "positions"], meta_fields=[])
@dataclass(frozen=True)
class CachedLayer:
    """One layer's share of a cache: keys and values [B, K, S, H], positions [B, S]."""

    keys: jax.Array
    values: jax.Array
    positions: jax.Array


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    past: CachedLayer,
    rules: ShardingRules,
) -> jax.Array:
    """Causal attention of a few new tokens to the cached ones and to each other.

    Args:
      query: [B, C, N, H]; the same on every device of the ring, as are the next three.
      key, value: [B, C, K, H] of the new tokens.
      positions: int32 [B, C]; ``EMPTY_SLOT`` for a token that is only padding.
      past: what the cache holds, sharded over the ring.
      rules: which mesh axes are which.

    Returns:
      [B, C, N, H] in the query's dtype.
    """

    def local(
        query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array, past: CachedLayer
    ) -> jax.Array:
        new = _attend_to(query, positions, key, value, positions)
        if _ring_in_mesh():
            query, positions = jax.lax.pcast((query, positions), "ring", to="varying")
        keys, values = past.keys.swapaxes(1, 2), past.values.swapaxes(1, 2)
        earlier = _attend_to(query, positions, keys, values, past.positions)
        if _ring_in_mesh():
            earlier = _merge_over_ring(earlier)
        return merge(earlier, new).output.astype(query.dtype)

    tokens = rules.spec("batch", None, "heads", None)
    entries: Any = rules.spec("batch", "heads", "sequence", None)
    slots: Any = rules.spec("batch", "sequence")
    past_specs = CachedLayer(entries, entries, slots)
    return _on_shards(local, (tokens, tokens, tokens, rules.spec("batch", None), past_specs), tokens)(
        query, key, value, positions, past
    )


def append(
    cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array, rules: ShardingRules
) -> KVCache:
    """Stores the new tokens of all layers on the next device of the ring.

    Capacity is the caller's to keep (``slots_needed``): a full shard would be overwritten at its end.

    Args:
      cache: donate it, and it is updated in place.
      keys, values: [layers, B, C, K, H], the same on every device of the ring.
      positions: int32 [B, C].
      rules: which mesh axes are which.
    """

    def local(cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array) -> KVCache:
        device = jax.lax.axis_index("ring") if _ring_in_mesh() else 0
        mine = cache.calls % ambient_axis_size("ring") == device
        slot = cache.filled[0]

        def write(shard: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            old = jax.lax.dynamic_slice_in_dim(shard, slot, new.shape[axis], axis)
            kept = jnp.where(mine, new.astype(shard.dtype), old)
            return jax.lax.dynamic_update_slice_in_dim(shard, kept, slot, axis)

        return KVCache(
            keys=write(cache.keys, keys.swapaxes(2, 3), 3),
            values=write(cache.values, values.swapaxes(2, 3), 3),
            positions=write(cache.positions, positions, 1),
            filled=cache.filled + jnp.where(mine, positions.shape[1], 0),
            calls=cache.calls + 1,
        )

    new = rules.spec("layer", "batch", None, "heads", None)
    specs = cache_specs(rules)
    return _on_shards(local, (specs, new, new, rules.spec("batch", None)), specs)(
        cache, keys, values, positions
    )


def fill(
    cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array, rules: ShardingRules
) -> KVCache:
    """Stores a prefill in an empty cache: every device keeps the block it already holds.

    Args:
      cache: without tokens.
      keys, values: [layers, B, T, K, H], T sharded over the ring in any layout.
      positions: int32 [B, T]; ``EMPTY_SLOT`` for padding.
      rules: which mesh axes are which.
    """

    def local(cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array) -> KVCache:
        def write(shard: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(shard, new.astype(shard.dtype), 0, axis)

        return KVCache(
            keys=write(cache.keys, keys.swapaxes(2, 3), 3),
            values=write(cache.values, values.swapaxes(2, 3), 3),
            positions=write(cache.positions, positions, 1),
            filled=jnp.full_like(cache.filled, positions.shape[1]),
            calls=cache.calls,
        )

    specs = cache_specs(rules)
    new = rules.spec("layer", "batch", "sequence", "heads", None)
    return _on_shards(local, (specs, new, new, specs.positions), specs)(cache, keys, values, positions)


def _attend_to(
    query: jax.Array, positions: jax.Array, keys: jax.Array, values: jax.Array, key_positions: jax.Array
) -> SoftmaxState:
    """A few queries [B, C, N, H] to keys [B, S, K, H]: their C x S scores are small, so one product."""
    mask = HopMask(MaskSpec(causal=True), TokenLabels(positions), TokenLabels(key_positions))
    return VanillaKernel().forward(query, keys, values, mask, Scores(query.shape[-1] ** -0.5))


def _ring_in_mesh() -> bool:
    return "ring" in jax.sharding.get_abstract_mesh().axis_names


def _merge_over_ring(state: SoftmaxState) -> SoftmaxState:
    """Joins what every device found in its own shard; see ``softmax.merge`` for the two-way case."""
    largest = jax.lax.pmax(state.logsumexp, "ring")
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weight = jnp.exp(state.logsumexp - largest)
    output, total = jax.lax.psum((state.output * weight[..., None], weight), "ring")
    output = output / jnp.where(total == 0.0, 1.0, total)[..., None]
    return SoftmaxState(output, largest + jnp.log(total))


def _on_shards(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """``jax.shard_map`` over the ambient mesh; the function itself where there is none."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)
