"""Time of a decode step over the time of reading its cache once."""

import jax

from evals.compile.hardware import hardware_of
from evals.gpu.rows import Found
from evals.speed.attention_benchmark import Dtype
from evals.speed.decode_step import decode_speed


def decode(cached: int, query_dtype: Dtype, rounds: int, calls: int) -> Found:
    """Times the attention of one new token to a bfloat16 cache, with the heads of Llama-3-8B.

    Args:
      cached: number of tokens in the cache.
      query_dtype, rounds, calls: see ``decode_speed``.

    Returns:
      Seconds of the step over those of reading the cache once, at the bandwidth that is measured beside it.
    """
    speed = decode_speed(
        cached,
        "bfloat16",
        heads=32,
        kv_heads=8,
        head_dim=128,
        repeats=rounds,
        devices=1,
        calls=calls,
        query_dtype=query_dtype,
    )
    floor = speed.cache_bytes / speed.bandwidth
    details = {
        "seconds": speed.step_seconds,
        "cache_bytes": speed.cache_bytes,
        "bandwidth": speed.bandwidth,
    }
    hardware = hardware_of(jax.devices()[0].device_kind)
    if hardware is not None:
        details["published_bandwidth"] = hardware.memory_bandwidth
    low, high = speed.step_seconds_low / floor, speed.step_seconds_high / floor
    return Found(speed.ratio, "x reading the cache", low, high, details)
