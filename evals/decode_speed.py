"""Time of one decode step with a long cache, relative to the time of reading the cache once.

    python evals/decode_speed.py --cached 524288

A step computes little and reads every key and value, so memory bandwidth limits its speed. The bandwidth
is measured in the same process, interleaved with the step, by summing a float32 array of as many bytes as
the cache has. The ratio is of the two medians: another program that slows one down slows both.
"""

import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import rich
from jax.sharding import NamedSharding, PartitionSpec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring import cli
from agentic_ring.attention.cache import CachedAttentionInputs, CachedLayer, cache_specs
from agentic_ring.attention.cache.decode import attend_new_tokens
from agentic_ring.attention.cache.storage import CACHE_DTYPES, CacheDtype, Stored, empty, store_like
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh, simulate_cpu_devices
from evals.common.rows import write_rows
from evals.speed.interleaved import time_interleaved


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
      step_seconds: median seconds of one token's attention.
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
) -> DecodeSpeed:
    """Times one layer's attention of one new token to ``cached`` tokens, batch 1.

    The flags of ``main`` describe the arguments; ``cached`` is a multiple of the devices, by default all.
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
        new = jnp.ones((1, 1, kv_heads, head_dim))
        query, positions = jnp.ones((1, 1, heads, head_dim)), jnp.full((1, 1), cached, jnp.int32)

        def attend(past: CachedLayer) -> jax.Array:
            return attend_new_tokens(CachedAttentionInputs(query, new, new, positions, past), rules)

        step = jax.jit(attend)
        read = jax.jit(lambda x: x.sum(axis=1))
        times = time_interleaved(repeats, partial(step, past), partial(read, read_array))
    step_seconds, read_seconds = (statistics.median(seconds) for seconds in times)
    bandwidth = read_array.nbytes / read_seconds
    return DecodeSpeed(
        dtype=dtype,
        ring=devices,
        cached=cached,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        cache_bytes=cache_bytes,
        bandwidth=bandwidth,
        step_seconds=step_seconds,
        ratio=step_seconds / (cache_bytes / bandwidth),
        repeats=repeats,
    )


def _filled(shape: tuple[int, ...], like: Stored, key: jax.Array) -> CachedLayer:
    keys, values = (store_like(jax.random.normal(k, shape), like) for k in jax.random.split(key))
    return CachedLayer(keys, values, jnp.arange(shape[2], dtype=jnp.int32)[None])


def main(
    cached: int = 524_288,
    dtypes: tuple[CacheDtype, ...] = CACHE_DTYPES,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    repeats: int = 15,
    devices: int = 1,
    rows_to: Path | None = None,
) -> None:
    """Times a decode step and prints its ratio to reading the cache once.

    Args:
      cached: Number of tokens in the cache.
      dtypes: Types of the cache; one row of the table each.
      heads: Number of query heads.
      kv_heads: Number of key and value heads.
      head_dim: Size of a head.
      repeats: Number of timed steps; medians are reported.
      devices: Number of devices of the ring; simulated where there is only a CPU.
      rows_to: CSV file for the rows; none is written if left out.
    """
    simulate_cpu_devices(devices)
    rows = [decode_speed(cached, dtype, heads, kv_heads, head_dim, repeats, devices) for dtype in dtypes]
    table = Table(
        title=f"decoding one token with {cached:,} in the cache", title_justify="left", box=SIMPLE_HEAD
    )
    for column in ("cache", "ring", "MB", "memory GB/s", "step ms", "step / read"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (row.cache_bytes / 1e6, row.bandwidth / 1e9, row.step_seconds * 1e3)
        table.add_row(row.dtype, str(row.ring), *(f"{x:,.1f}" for x in figures), f"{row.ratio:.2f}")
    rich.print(table)
    if rows_to is not None:
        write_rows(rows_to, [asdict(row) for row in rows])


if __name__ == "__main__":
    cli.run(main)
