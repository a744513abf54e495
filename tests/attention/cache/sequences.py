"""Sequences for caches, and what a layer does with them, step by step, against attention in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention import MaskSpec
from agentic_ring.attention.cache import (
    EMPTY_SLOT,
    CachedAttentionInputs,
    KVCache,
    append,
    append_blocks,
    empty_cache,
    slots_needed,
)
from agentic_ring.attention.cache.cached_attention import attend_chunk, attend_new_tokens
from agentic_ring.attention.cache.kv_cache import store_like
from agentic_ring.mesh import MeshShape, ShardingRules, mesh_on_first_devices
from tests.attention.oracle import exact, random_arrays

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8
RULES = ShardingRules()
CAUSAL = MaskSpec(causal=True)
MASKS = {
    "causal": CAUSAL,
    "window": MaskSpec(causal=True, window=5),
    "window and sinks": MaskSpec(causal=True, window=5, prefix=3),
}


def tokens(batch: int, length: int, heads=(HEADS, KEY_HEADS)) -> list[np.ndarray]:
    return random_arrays(*((batch, length, count, HEAD_DIM) for count in heads))[:3]


def make_cache(batch, capacity, ring, dtype="float32", layers=1, key_heads=KEY_HEADS) -> KVCache:
    return empty_cache(layers, batch, capacity, key_heads, HEAD_DIM, dtype, ring)


def compile_step(attend, store):
    """What a layer does: attends, and then the new tokens are stored."""

    @partial(jax.jit, static_argnames="mask", donate_argnames="cache")
    def step(cache, query, key, value, positions, mask=CAUSAL, prefix=None):
        shared = None if prefix is None else prefix.layer(0)
        inputs = CachedAttentionInputs(query, key, value, positions, cache.layer(0), shared)
        output = attend(inputs, RULES, mask)
        return output, store(cache, key[None], value[None], positions, RULES)

    return step


decode_step = compile_step(attend_new_tokens, append)
chunk_step = compile_step(attend_chunk, append_blocks)


def counted(lengths: list[int], columns: int, start: int | list[int] = 0) -> np.ndarray:
    """Positions from ``start`` on in rows of these lengths, and padding after them."""
    place = np.arange(columns)
    starts = np.broadcast_to(start, len(lengths))[:, None]
    return np.where(place < np.array(lengths)[:, None], starts + place, EMPTY_SLOT).astype(np.int32)


def follow(
    shape: MeshShape,
    positions: np.ndarray,
    steps: list[tuple],
    *,
    mask: MaskSpec = CAUSAL,
    heads=(HEADS, KEY_HEADS),
    prefix: int = 0,
    tolerance: float = 2e-6,
) -> tuple[np.ndarray, KVCache]:
    """Takes the columns of ``positions`` in ``steps``, (step, columns), and compares outputs with the truth.

    The first ``prefix`` tokens of all rows are the same and lie in a cache of their own. Returns the last
    output, and the cache.
    """
    rows, length = positions.shape
    query, key, value = tokens(rows, prefix + length, heads=heads)
    first = key[:, :prefix], value[:, :prefix]
    for x in first:
        x[:] = x[:1]
    places = np.concatenate([np.tile(np.arange(prefix), (rows, 1)), positions], axis=1)
    expected = exact((query, key, value, query), mask, positions=places).output[:, prefix:]
    calls = [columns for step, columns in steps if step is decode_step]
    capacity = slots_needed(length - sum(calls), len(calls), max(calls, default=1), shape.ring)
    with jax.set_mesh(mesh_on_first_devices(shape)):
        cache = make_cache(rows, capacity, shape.ring, key_heads=heads[1])
        shared = None
        if prefix:
            shared = make_cache(1, prefix, shape.ring, key_heads=heads[1])
            kept = ((store_like(jnp.asarray(x[:1]).swapaxes(1, 2), shared.keys[0]),) for x in first)
            shared = KVCache(*kept, jnp.arange(prefix)[None], shared.filled, shared.calls)
        output, end = None, 0
        for step, columns in steps:
            new = slice(end, end := end + columns)
            arrays = (x[:, prefix:][:, new] for x in (query, key, value))
            output, cache = step(cache, *arrays, positions[:, new], mask=mask, prefix=shared)
            if output is not None:
                np.testing.assert_allclose(output, expected[:, new], atol=tolerance)
    return output, cache
