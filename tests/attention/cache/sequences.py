"""Sequences for caches, their attention in float64, and the step of a layer that attends and stores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention import MaskSpec, reference_attention
from agentic_ring.attention.cache import CachedAttentionInputs, KVCache, empty_cache
from agentic_ring.mesh import ShardingRules

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8
RULES = ShardingRules()
CAUSAL = MaskSpec(causal=True)
MASKS = {
    "causal": CAUSAL,
    "window": MaskSpec(causal=True, window=5),
    "window and sinks": MaskSpec(causal=True, window=5, prefix=3),
}


def tokens(batch: int, length: int, seed: int = 0, heads=(HEADS, KEY_HEADS)) -> tuple[np.ndarray, ...]:
    """Random query, key and value of a sequence."""
    random = np.random.default_rng(seed)
    shapes = [(batch, length, count, HEAD_DIM) for count in (heads[0], heads[1], heads[1])]
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def oracle(query, key, value, positions, mask: MaskSpec, **scores: float | None) -> np.ndarray:
    """Attention in float64; ``positions`` is a (query, key) pair, ``scores`` are scale and soft cap."""
    with jax.enable_x64(True):
        arrays = (jnp.asarray(np.asarray(x, np.float64)) for x in (query, key, value))
        reference = jax.jit(partial(reference_attention, mask=mask, **scores))
        return np.asarray(reference(*arrays, positions=positions))


def make_cache(
    batch: int, capacity: int, ring: int, dtype="float32", layers: int = 1, key_heads: int = KEY_HEADS
) -> KVCache:
    """An empty cache for such sequences."""
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
