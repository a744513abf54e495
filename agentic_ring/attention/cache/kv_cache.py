"""A key/value cache sharded along the sequence: its arrays, their formats, and how tokens are stored in it.

What is stored never moves to another device. New tokens go to the devices in turn, whole calls at a
time, so the shards fill evenly; a prompt, or a chunk of one, stays where it was computed, every device
keeping its block. A slot's place therefore says nothing about its token: every slot carries its
position, and -1 marks an empty one.

    device      0            1            2            3
    prefill     0 1 2 3      4 5 6 7      8 9 10 11    12 13 14 15     (or any other layout)
    call 0      16 17
    call 1                   18 19
    call 4      24 25  ...

Rows of a batch may differ in length: each has its own positions, and where a row has no token its
slots stay empty. Attention to a cache is in ``cached_attention.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import ShardingRules, devices_along

EMPTY_SLOT = -1
"""Position of a slot that holds no token, and of a token that is only padding."""

SLOTS_UNIT = 512
"""Slots of a long shard are a multiple of this, so that products can take it in equal pieces."""

CacheDtype = Literal["float32", "bfloat16", "int8"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stored:
    """Keys or values as a cache keeps them, in float32, bfloat16, or int8 with one scale per token and head.

                    bytes per number  largest error of a number
        float32     4                 0
        bfloat16    2                 2**-8 of the number itself
        int8        1 + 4 / H         1 / 254 of the largest of its token and head

    Attention of standard normal queries to 4096 such keys and values of 64 numbers (measured against
    float64, relative root mean square): float32 4e-7, bfloat16 2.5e-3, int8 9e-3; with queries four times
    as large, so that few keys take most of the weight, 5e-7, 5e-3 and 1.8e-2.

    bfloat16 is kept as its bits in uint16. XLA's CPU compiler has no bfloat16 slices: it would widen a
    whole cache to float32 to take a piece of it, at every step (measured at 537 MB: 1.08 GB of temporaries
    and 460 ms, against 8 MB and 40 ms from the bits).
    """

    numbers: jax.Array
    """[..., S, H], float32, uint16 (the bits of bfloat16) or int8."""
    scales: jax.Array | None = None
    """float32 [..., S], by which int8 numbers are to be multiplied; None for the others."""

    def widened(self) -> jax.Array:
        """The numbers in float32, not multiplied by the scales."""
        if self.numbers.dtype == jnp.uint16:
            bits = self.numbers.astype(jnp.uint32) << 16
            return jax.lax.bitcast_convert_type(bits, jnp.float32)
        return self.numbers.astype(jnp.float32)

    def narrowed(self) -> jax.Array:
        """The numbers of bfloat16 or int8 in bfloat16, not multiplied by the scales; exact."""
        if self.numbers.dtype == jnp.uint16:
            return jax.lax.bitcast_convert_type(self.numbers, jnp.bfloat16)
        return self.numbers.astype(jnp.bfloat16)

    def restored(self) -> jax.Array:
        """The keys or values themselves, float32; for a piece of a cache, not for all of it."""
        numbers = self.widened()
        return numbers if self.scales is None else numbers * self.scales[..., None]


def empty(shape: tuple[int, ...], dtype: CacheDtype) -> Stored:
    """Zeros, [..., S, H].

    Raises:
      UnknownNameError: a dtype that no cache can have.
    """
    if dtype not in CACHE_DTYPES:
        raise UnknownNameError("cache dtype", str(dtype), CACHE_DTYPES)
    scales = jnp.zeros(shape[:-1], jnp.float32) if dtype == "int8" else None
    kept_as = {"float32": jnp.float32, "bfloat16": jnp.uint16, "int8": jnp.int8}[dtype]
    return Stored(jnp.zeros(shape, kept_as), scales)


def store_like(x: jax.Array, like: Stored) -> Stored:
    """``x`` [..., H] in the form of ``like``.

    Raises:
      ArgumentError: ``x`` is float64, which no cache keeps.
    """
    if x.dtype == jnp.float64:
        raise ArgumentError("keys and values are float64, which a cache would round; cast them to float32")
    if like.numbers.dtype == jnp.uint16:
        return Stored(jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16))
    x = x.astype(jnp.float32)
    if like.scales is None:
        return Stored(x)
    scales = jnp.abs(x).max(axis=-1) / 127
    # A token of zeros, or one so small that its scale vanishes, is stored as zeros.
    divisor = jnp.where(scales == 0.0, 1.0, scales)
    return Stored(jnp.round(x / divisor[..., None]).astype(jnp.int8), scales)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, and the positions of their tokens.

    There is one entry per layer: numbers [B, K, S, H] and scales [B, K, S], S sharded over the ring. A head's
    slots lie together, as decoding reads them; in the other order every step would transpose them all. Layers
    are arrays of their own: out of one array for all, a step would copy every layer before it reads it (6
    times the time of reading it once, measured on a CPU, against 1.3).
    """

    keys: tuple[Stored, ...]
    values: tuple[Stored, ...]
    positions: jax.Array  # int32 [B, S], ``EMPTY_SLOT`` where there is no token
    filled: jax.Array  # int32 [ring], the slots in use on each device
    calls: jax.Array  # int32, how many calls of ``append`` there were; it picks the next device

    def layer(self, index: int) -> "CachedLayer":
        """The keys, values and positions of layer ``index``."""
        return CachedLayer(self.keys[index], self.values[index], self.positions)

    def only(self, index: int) -> "KVCache":
        """The cache of layer ``index`` alone."""
        return replace(self, keys=(self.keys[index],), values=(self.values[index],))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedLayer:
    """One layer's share of a cache: keys and values [B, K, S, H], positions [B, S]."""

    keys: Stored
    values: Stored
    positions: jax.Array


def cache_specs(rules: ShardingRules, dtype: CacheDtype, layers: int) -> KVCache:
    """The PartitionSpec of every array of a cache, in a cache's place; ``rules`` are those of its keys."""
    layer, filled, calls = layer_specs(rules, dtype == "int8"), rules.spec("sequence"), PartitionSpec()
    return KVCache((layer.keys,) * layers, (layer.values,) * layers, layer.positions, filled, calls)  # pyright: ignore[reportArgumentType]


def specs_of(cache: KVCache, rules: ShardingRules) -> KVCache:
    """The PartitionSpec of every array of this cache, in a cache's place."""
    dtype = "float32" if cache.keys[0].scales is None else "int8"  # all without scales have the same specs
    return cache_specs(rules, dtype, len(cache.keys))


def layer_specs(rules: ShardingRules, scaled: bool) -> CachedLayer:
    """The PartitionSpec of every array of one layer of a cache, with scales or without."""
    numbers: Any = rules.spec("batch", "heads", "sequence", None)
    scales: Any = rules.spec("batch", "heads", "sequence") if scaled else None
    slots: Any = rules.spec("batch", "sequence")
    return CachedLayer(Stored(numbers, scales), Stored(numbers, scales), slots)


def slots_needed(
    prefill_tokens: int, calls: int, tokens_per_call: int, ring: int, chunk: int | None = None
) -> int:
    """Capacity for a prefill, padding included, followed by ``calls`` of ``append``.

    Where the prompt goes in by chunks of ``chunk`` tokens, each is padded to the ring.
    """
    chunk = chunk or prefill_tokens or 1
    whole, last = divmod(prefill_tokens, chunk)
    slots = whole * -(-chunk // ring) + -(-last // ring) + -(-calls // ring) * tokens_per_call
    return ring * (slots if slots <= SLOTS_UNIT else -(-slots // SLOTS_UNIT) * SLOTS_UNIT)


def empty_cache(
    layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype: CacheDtype, ring: int
) -> KVCache:
    """A cache without tokens. ``capacity`` is the slots of all ``ring`` devices together."""
    keys, values = (
        tuple(empty((batch, kv_heads, capacity, head_dim), dtype) for _ in range(layers)) for _ in range(2)
    )
    return KVCache(
        keys,
        values,
        positions=jnp.full((batch, capacity), EMPTY_SLOT, jnp.int32),
        filled=jnp.zeros(ring, jnp.int32),
        calls=jnp.zeros((), jnp.int32),
    )


def first_row(cache: KVCache) -> KVCache:
    """The cache of only the first row of a batch, for all rows of another to share as a prefix."""
    keys, values = jax.tree.map(lambda x: x[:1], (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values, positions=cache.positions[:1])


def grown(cache: KVCache, capacity: int, ring: int) -> KVCache:
    """Moves a cache to one with more slots; the new ones are empty, and no token changes its device.

    One array after another is moved and deleted, so that memory stays below the new cache's and one array.
    ``capacity`` is the slots of all ``ring`` devices together.
    """

    def move(x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
        larger = jax.block_until_ready(_with_slots(x, capacity, ring, axis, fill, x.sharding))
        x.delete()
        return larger

    keys, values = jax.tree.map(partial(move, axis=2), (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values, positions=move(cache.positions, 1, EMPTY_SLOT))


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _with_slots(x: jax.Array, capacity: int, ring: int, axis: int, fill: int, sharding: Any) -> jax.Array:
    """Pads each device's part of ``axis`` with ``fill``."""
    shards = x.reshape(*x.shape[:axis], ring, -1, *x.shape[axis + 1 :])
    widths = [(0, 0)] * shards.ndim
    widths[axis + 1] = (0, capacity // ring - shards.shape[axis + 1])
    larger = jnp.pad(shards, widths, constant_values=fill)
    larger = larger.reshape(*x.shape[:axis], capacity, *x.shape[axis + 1 :])
    return jax.lax.with_sharding_constraint(larger, sharding)


def append(
    cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array, rules: ShardingRules
) -> KVCache:
    """Stores the new tokens of all layers on the next device of the ring. Communicates nothing.

    Capacity is the caller's to keep (``slots_needed``). A compiled program cannot raise an error: there a
    full shard makes everything that attends to the cache NaN.

    Args:
      cache: donate it, and it is updated in place.
      keys, values: [layers, B, C, K, H], the same on every device of the ring.
      positions: int32 [B, C]; ``EMPTY_SLOT`` for a row that has no token here.

    Raises:
      ArgumentError: the tokens do not fit: outside ``jax.jit`` into what is left of the device's shard,
        inside it into an empty shard.
    """
    return _stored(cache, keys, values, positions, rules, tokens=None)


def append_blocks(
    cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array, rules: ShardingRules
) -> KVCache:
    """Stores a prompt, or the next chunk of one, as ``append`` does, but every device keeps its block.

    Args:
      keys, values: [layers, B, T, K, H], T sharded over the ring in any layout.
      positions: int32 [B, T]; ``EMPTY_SLOT`` for padding.
    """
    return _stored(cache, keys, values, positions, rules, tokens="sequence")


def _stored(
    cache: KVCache,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    rules: ShardingRules,
    tokens: str | None,
) -> KVCache:
    """The cache with new tokens along the logical axis ``tokens``; None is all of them on the next device."""
    rules = rules.of_keys(keys.shape[3])
    ring = devices_along(jax.sharding.get_abstract_mesh(), rules.sequence)
    one_device, used = tokens is None, 0
    slots, new = cache.positions.shape[1] // ring, -(-positions.shape[1] // (1 if one_device else ring))
    if not isinstance(cache.filled, Tracer) and cache.filled.is_fully_addressable:
        filled = np.asarray(cache.filled)
        used = int(filled[int(cache.calls) % len(filled)] if one_device else filled.max())
    if used + new > slots:  # as far as that is known outside the program
        raise ArgumentError(
            f"{new} more tokens on a device whose shard of the cache has {slots} slots, {used} of them "
            "filled; make the cache with more slots (agentic_ring.attention.cache.slots_needed)"
        )

    def local(cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array) -> KVCache:
        length = positions.shape[1]
        if tokens is not None:
            stored = _write(cache, keys, values, positions, mine=None)
            return KVCache(*stored, cache.filled + length, cache.calls)
        ring = ring_axis(rules)
        mine = cache.calls % ring.size == ring.index()
        stored = _write(cache, keys, values, positions, mine)
        return KVCache(*stored, cache.filled + jnp.where(mine, length, 0), cache.calls + 1)

    specs, new = specs_of(cache, rules), rules.spec(None, "batch", tokens, "heads", None)
    run = on_shards(local, (specs, new, new, rules.spec("batch", tokens)), specs)
    return run(cache, keys, values, positions)


def _write(
    cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array, mine: jax.Array | None
) -> tuple[tuple[Stored, ...], tuple[Stored, ...], jax.Array]:
    """This device's (keys, values, positions) with new tokens [layers, B, C, K, H] in the next slots.

    Where ``mine`` is False nothing changes: the same slots are written with what they hold. Where the tokens
    do not fit, the last slots become NaN at a position that every query attends to.
    """
    first = cache.filled[0]
    full = first + positions.shape[1] > cache.positions.shape[1]
    keys, values = (jnp.where(full, jnp.nan, x) for x in (keys, values))
    positions = jnp.where(full, 0, positions)

    def write(shard: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        if mine is not None:
            new = jnp.where(mine, new, jax.lax.dynamic_slice_in_dim(shard, first, new.shape[axis], axis))
        return jax.lax.dynamic_update_slice_in_dim(shard, new, first, axis)

    def write_entries(shards: tuple[Stored, ...], new: jax.Array) -> tuple[Stored, ...]:
        layers = zip(shards, new.swapaxes(2, 3), strict=True)
        return tuple(jax.tree.map(partial(write, axis=2), shard, store_like(x, shard)) for shard, x in layers)

    return (
        write_entries(cache.keys, keys),
        write_entries(cache.values, values),
        write(cache.positions, positions, 1),
    )


def ring_axis(rules: ShardingRules) -> RingAxis:
    """The devices that share a sequence on the ambient mesh, for use inside ``on_shards``."""
    return RingAxis.over(None if jax.sharding.get_abstract_mesh().empty else rules.sequence)


def on_shards(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """``jax.shard_map`` over the ambient mesh; the function itself where there is none."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)
