"""Attention of one new token to a long cache, beside reading the cache once.

A step computes little and reads every key and value, so memory bandwidth limits its speed. The bandwidth is
measured interleaved with the steps, by summing a float32 array of as many bytes as the cache has.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from agentic_ring.attention.cache import CachedAttentionInputs, CachedLayer, cache_specs
from agentic_ring.attention.cache.decode import attend_new_tokens
from agentic_ring.attention.cache.storage import CacheDtype, Stored, empty, store_like
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.results.timing import Spread, time_interleaved
from evals.benchmarks.rows import Line


def decode(
    cached: int,
    dtypes: Sequence[CacheDtype],
    query_dtypes: Sequence[str],
    heads: int,
    kv_heads: int,
    head_dim: int,
    rounds: int,
    calls: int,
) -> list[Line]:
    """Times one layer's attention of one new token to ``cached`` tokens, batch 1, on one device.

    Args:
      cached: number of tokens in the cache.
      dtypes: types of the cache.
      query_dtypes: types of the new token's query, key and value.
      heads, kv_heads, head_dim: sizes of the layer.
      rounds: number of timed rounds.
      calls: steps per round, queued one behind the other; see ``time_interleaved``.

    Returns:
      Bytes of the cache that a step reads per second, and its time over that of reading them once.
    """
    rules, mesh = ShardingRules(), make_mesh(MeshShape(ring=1), jax.devices()[:1])
    lines = []
    for dtype in dtypes:
        with jax.set_mesh(mesh):
            specs = cache_specs(rules, dtype, layers=1).layer(0)
            shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            shape = (1, kv_heads, cached, head_dim)
            like = jax.eval_shape(partial(empty, shape, dtype))
            past = jax.jit(partial(_filled, shape, like), out_shardings=shardings)(jax.random.key(0))
            cache_bytes = sum(x.nbytes for x in jax.tree.leaves((past.keys, past.values)))
            # As many bytes as the cache has, but more than any processor's cache holds.
            numbers = jnp.ones(max(cache_bytes, 1 << 28) // 4)

            def attend(past: CachedLayer, query: jax.Array, new: jax.Array) -> jax.Array:
                position = jnp.full((1, 1), cached, jnp.int32)
                return attend_new_tokens(CachedAttentionInputs(query, new, new, position, past), rules)

            steps = []
            for query_dtype in query_dtypes:
                query, new = (jnp.ones((1, 1, count, head_dim), query_dtype) for count in (heads, kv_heads))
                steps.append(partial(jax.jit(attend), past, query, new))
            read = partial(jax.jit(jnp.sum), numbers)
            reading, *times = time_interleaved(rounds, read, *steps, calls=calls)
        once = [seconds * cache_bytes / numbers.nbytes for seconds in reading]
        for query_dtype, seconds in zip(query_dtypes, times, strict=True):
            rate = Spread.of(cache_bytes / x / 1e9 for x in seconds)
            ratios = {"reading the cache": Spread.ratio(seconds, once)}
            details = {
                "cache_bytes": cache_bytes,
                "seconds": Spread.of(seconds).median,
                "read_gigabytes_per_second": cache_bytes / Spread.of(once).median / 1e9,
            }
            lines.append(Line(f"{query_dtype} query", f"{dtype} cache", rate, "GB/s", ratios, details))
    return lines


def _filled(shape: tuple[int, ...], like: Stored, key: jax.Array) -> CachedLayer:
    keys, values = (store_like(jax.random.normal(k, shape), like) for k in jax.random.split(key))
    return CachedLayer(keys, values, jnp.arange(shape[2], dtype=jnp.int32)[None])
