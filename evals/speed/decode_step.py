"""Time of one decode step with a long cache, beside the time of reading the cache once."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from agentic_ring.attention.cache import CachedAttentionInputs, CachedLayer, cache_specs
from agentic_ring.attention.cache.decode import attend_new_tokens
from agentic_ring.attention.cache.storage import CacheDtype, Stored, empty, store_like
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from evals.speed.attention_benchmark import Dtype
from evals.speed.interleaved import Spread, time_interleaved


@dataclass(frozen=True)
class DecodeSpeed:
    """Speed of decoding with one type of cache.

    Attributes:
      dtype: type of the cache.
      ring: number of devices that share it.
      cached: number of tokens in it.
      heads, kv_heads, head_dim: sizes of the layer.
      cache_bytes: bytes of the layer's keys and values, scales included.
      bandwidth: bytes per second of summing float32.
      step_seconds: median seconds of one token's attention; and the least and the most of them.
      ratio: ``step_seconds`` over the seconds of reading ``cache_bytes`` at this bandwidth.
      repeats: number of timed steps.
    """

    dtype: str
    ring: int
    cached: int
    heads: int
    kv_heads: int
    head_dim: int
    cache_bytes: int
    bandwidth: float
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    ratio: float
    repeats: int


def decode_speed(
    cached: int,
    dtype: CacheDtype,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    repeats: int = 15,
    devices: int | None = None,
    calls: int = 1,
    query_dtype: Dtype = "float32",
) -> DecodeSpeed:
    """Times one layer's attention of one new token to ``cached`` tokens, batch 1.

    Args:
      cached: number of tokens in the cache, a multiple of the devices.
      dtype: type of the cache.
      heads, kv_heads, head_dim: sizes of the layer.
      repeats: number of timed rounds.
      devices: number of devices that share the cache; by default all.
      calls: steps per round, queued one behind the other; see ``time_interleaved``.
      query_dtype: type of the new token's query, key and value.
    """
    devices = devices or jax.device_count()
    mesh = make_mesh(MeshShape(ring=devices), jax.devices()[:devices])
    rules = ShardingRules()
    with jax.set_mesh(mesh):
        specs = cache_specs(rules, dtype, layers=1).layer(0)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        shape = (1, kv_heads, cached, head_dim)
        like = jax.eval_shape(partial(empty, shape, dtype))
        fill = jax.jit(partial(_filled, shape, like), out_shardings=shardings)
        past = fill(jax.random.key(0))
        # As many bytes as the cache has, but more than any processor's cache holds.
        cache_bytes = sum(x.nbytes for x in jax.tree.leaves((past.keys, past.values)))
        numbers = max(cache_bytes, 1 << 28) // (4 * devices) * devices
        read_array = jax.device_put(
            jnp.ones((devices, numbers // devices)), NamedSharding(mesh, PartitionSpec("ring"))
        )
        new, query = (jnp.ones((1, 1, count, head_dim), query_dtype) for count in (kv_heads, heads))
        positions = jnp.full((1, 1), cached, jnp.int32)

        def attend(past: CachedLayer) -> jax.Array:
            return attend_new_tokens(CachedAttentionInputs(query, new, new, positions, past), rules)

        step = jax.jit(attend)
        read = jax.jit(lambda x: x.sum(axis=1))
        times = time_interleaved(repeats, partial(step, past), partial(read, read_array), calls=calls)
    step_spread, read_spread = (Spread.of(seconds) for seconds in times)
    bandwidth = read_array.nbytes / read_spread.median
    return DecodeSpeed(
        dtype=dtype,
        ring=devices,
        cached=cached,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        cache_bytes=cache_bytes,
        bandwidth=bandwidth,
        step_seconds=step_spread.median,
        step_seconds_low=step_spread.low,
        step_seconds_high=step_spread.high,
        ratio=step_spread.median / (cache_bytes / bandwidth),
        repeats=repeats,
    )


def _filled(shape: tuple[int, ...], like: Stored, key: jax.Array) -> CachedLayer:
    keys, values = (store_like(jax.random.normal(k, shape), like) for k in jax.random.split(key))
    return CachedLayer(keys, values, jnp.arange(shape[2], dtype=jnp.int32)[None])
