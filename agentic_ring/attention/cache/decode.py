"""Attention of a few new tokens to a sharded cache, to a shared prefix, and to each other."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from agentic_ring.attention.cache.kv_cache import CachedLayer, layer_specs, on_shards, ring_in_mesh
from agentic_ring.attention.cache.shard_attention import attend_to_shard
from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, merge
from agentic_ring.mesh import ShardingRules


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    past: CachedLayer,
    rules: ShardingRules,
    mask: MaskSpec = MaskSpec(causal=True),
    prefix: CachedLayer | None = None,
) -> jax.Array:
    """Attention of a few new tokens to the cached ones and to each other.

    Each device attends to its own shard. What they found is merged by one all-reduce of B x C x N
    float32 numbers (the maxima) and one of B x C x N x (H + 1), whatever is cached; a prefix adds none.

    Args:
      query: [B, C, N, H]; the same on every device of the ring, as are the next three.
      key, value: [B, C, K, H] of the new tokens.
      positions: int32 [B, C], of each row's own sequence; ``EMPTY_SLOT`` for a token that is only
        padding.
      past: what the cache holds, sharded over the ring.
      rules: which mesh axes are which.
      mask: static part of the mask.
      prefix: what all rows have in common before ``past``: a cache of batch 1, read once for all rows
        (of a device: it is whole on each of those that the batch is spread over).

    Returns:
      [B, C, N, H] in the query's dtype; exactly 0 for padding.
    """

    def local(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
        past: CachedLayer,
        prefix: CachedLayer | None,
    ) -> jax.Array:
        labels = TokenLabels(positions)
        scores = Scores(query.shape[-1] ** -0.5)
        new = VanillaKernel().forward(query, key, value, HopMask(mask, labels, labels), scores)
        if ring_in_mesh():
            query, positions = jax.lax.pcast((query, positions), "ring", to="varying")
        earlier = attend_to_shard(query, positions, past, mask)
        if prefix is not None:
            earlier = merge(earlier, attend_to_shard(query, positions, prefix, mask))
        if ring_in_mesh():
            earlier = _merge_over_ring(earlier)
        return merge(earlier, new).output.astype(query.dtype)

    tokens = rules.spec("batch", None, "heads", None)
    in_specs = (
        *(tokens, tokens, tokens, rules.spec("batch", None)),
        *(layer_specs(past, rules), prefix_specs(prefix, rules)),
    )
    return on_shards(local, in_specs, tokens)(query, key, value, positions, past, prefix)


def prefix_specs(prefix: CachedLayer | None, rules: ShardingRules) -> CachedLayer | None:
    """The PartitionSpec of every array of a shared prefix: its one row is on all devices of the batch."""
    return None if prefix is None else layer_specs(prefix, replace(rules, batch=()))


def _merge_over_ring(state: SoftmaxState) -> SoftmaxState:
    """Joins what every device found in its own shard; see ``softmax.merge`` for the two-way case."""
    largest = jax.lax.pmax(state.logsumexp, "ring")
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weight = jnp.exp(state.logsumexp - largest)
    output, total = jax.lax.psum((state.output * weight[..., None], weight), "ring")
    output = output / jnp.where(total == 0.0, 1.0, total)[..., None]
    return SoftmaxState(output, largest + jnp.log(total))
