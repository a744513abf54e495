"""Attention of a few new tokens to a sharded cache, to a shared prefix, and to each other."""

import jax
import jax.numpy as jnp

from agentic_ring.attention.cache.kv_cache import on_shards, ring_axis
from agentic_ring.attention.cache.shard_attention import CachedAttentionInputs, attend_to_shard
from agentic_ring.attention.kernels.interface import Tile
from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, merge
from agentic_ring.mesh import ShardingRules


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
    scores = scores or Scores(inputs.query.shape[-1] ** -0.5)

    def local(inputs: CachedAttentionInputs) -> jax.Array:
        query, positions = inputs.query, inputs.positions
        labels = TokenLabels(positions)
        tile = Tile(query, inputs.key, inputs.value, HopMask(mask, labels, labels), scores)
        new = VanillaKernel().forward(tile)
        ring = ring_axis(rules).names
        if ring:
            query, positions = jax.lax.pcast((query, positions), ring, to="varying")
        earlier = attend_to_shard(query, positions, inputs.past, mask, scores, kernel)
        if inputs.prefix is not None:
            shared = attend_to_shard(query, positions, inputs.prefix, mask, scores, kernel)
            earlier = merge(earlier, shared)
        if ring:
            earlier = _merge_over_ring(earlier, ring)
        return merge(earlier, new).output.astype(inputs.query.dtype)

    specs = inputs.specs(rules, tokens=None)
    return on_shards(local, (specs,), specs.query)(inputs)


def _merge_over_ring(state: SoftmaxState, ring: tuple[str, ...]) -> SoftmaxState:
    """Joins what every device found in its own shard; see ``softmax.merge`` for the two-way case."""
    largest = jax.lax.pmax(state.logsumexp, ring)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weight = jnp.exp(state.logsumexp - largest)
    output, total = jax.lax.psum((state.output * weight[..., None], weight), ring)
    output = output / jnp.where(total == 0.0, 1.0, total)[..., None]
    return SoftmaxState(output, largest + jnp.log(total))
