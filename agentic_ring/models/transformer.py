"""The decoder stack of all transformer models, with rematerialisation and key/value caches.

Blocks are pre-norm, with rotary positions and a gated feedforward. Their parameters are stacked along a
leading axis and applied by ``lax.scan``: compile time and program size do not grow with depth, and each
layer's weights are gathered inside the scan (FSDP). Where local layers, which have a window, alternate with
global ones, the scan is over groups of layers, with a scan over the local ones of a group inside it. A model
of ``unstack_layers`` has a list of blocks. On a mesh with stages, whole sequences pass through the layers
stage by stage (``models.pipeline``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from agentic_ring.attention.cache import CachedAttentionInputs, CachedLayer, KVCache, append, append_blocks
from agentic_ring.attention.cache.cached_attention import attend_chunk, attend_new_tokens
from agentic_ring.attention.ring.layout import Layout
from agentic_ring.errors import MeshError
from agentic_ring.mesh import constrain
from agentic_ring.models.layers import FeedForward, ResidualDropout, stack_norm
from agentic_ring.models.pipeline import ambient_stages, apply_in_stages, layers_per_stage
from agentic_ring.models.self_attention import SAVE_ATTENTION, Attention
from agentic_ring.models.transformer_config import TransformerConfig

_BLOCK_INPUT = "block_input"
_KEPT = {
    "full": None,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "attention": SAVE_ATTENTION,
}
"""Rematerialisation policy of one block for ``jax.checkpoint``, by ``TransformerConfig.remat``."""


class Block(nnx.Module):
    """Attention and feedforward, each with pre-norm and residual connection."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        attention_key, feedforward_key = jax.random.split(key)
        self.attention = Attention(attention_key, config)
        self.feedforward = FeedForward(feedforward_key, config)
        self.config = config

    def configured(self, config: TransformerConfig) -> "Block":
        """Returns a block of the same parameters that computes by ``config``, that of its layer."""
        if config == self.config:
            return self
        block = jax.tree.map(lambda x: x, self)
        block.config = block.attention.config = config
        return block

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        layout: Layout | None,
        hidden: jax.Array | None = None,
        drop: Callable[[int, jax.Array], jax.Array] = lambda branch, added: added,
    ) -> jax.Array:
        """Returns the output for x [B, T, D]; arguments as in ``Transformer``.

        ``drop`` is applied to what attention (branch 0) and feedforward (branch 1) add to x.
        """
        x = x + drop(0, self.attention(x, positions, segment_ids, layout, hidden))
        return self.feedforward(x, partial(drop, 1))

    def prefill(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the output for x [B, T, D], and the keys and values [B, T, K, H]."""
        heads = self.attention.project(x, positions)
        attended = self.attention.attend_to_rows(heads, positions, segment_ids, None)
        return self.feedforward(x + self.attention.combine(attended)), heads[1:]

    def extend(
        self,
        attend: Callable[..., jax.Array],
        x: jax.Array,
        positions: jax.Array,
        past: CachedLayer,
        prefix: CachedLayer | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Applies the block to new tokens x [B, C, D] that attend to themselves and the cached tokens.

        ``attend`` is ``attend_new_tokens`` or, where C is sharded, ``attend_chunk``.
        """
        query, key, value = self.attention.project(x, positions)
        inputs = CachedAttentionInputs(query, key, value, positions, past, prefix)
        config = self.config
        heads = attend(inputs, config.rules, config.mask, config.attention_kernel, config.scores)
        return self.feedforward(x + self.attention.combine(heads)), (key, value)


class Transformer(nnx.Module):
    """Stacked blocks and the final norm; embeddings and heads belong to the models.

    The output is not normalised: a head applies ``norm`` to the tokens that it reads.
    """

    def __init__(self, key: jax.Array, config: TransformerConfig):
        keys = jax.random.split(key, config.layers)
        self.blocks: Block | nnx.List[Block] = jax.vmap(lambda k: Block(k, config))(keys)
        self.norm = stack_norm(config.width, config)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None = None,
        layout: Layout | None = None,
        dropout: ResidualDropout | None = None,
        hidden: jax.Array | None = None,
    ) -> jax.Array:
        """Encodes whole sequences.

        Args:
          x: [B, T, D], T sharded over the ring.
          positions: int32 [B, T] or [1, T], for rotary embeddings, and for the mask if ``layout`` is None.
          segment_ids: int32 [B, T]; tokens attend within their segment, negative is padding.
          layout: order of each sequence over the ring; None if only ``positions`` define it, which is slower.
          dropout: applied to what each residual branch adds; None drops nothing.
          hidden: int32 [B, T, 2], for each token the first position from which it is hidden and the first one
            after that at which it is not: tokens in this range do not attend to it. Positions are those of
            the mask: places in the sequence if ``layout`` is given. None hides no token.

        Raises:
          MeshError: the layers, their groups or the rows do not divide over the mesh's stages.
        """
        stages, every = ambient_stages(self.config.rules), self.config.global_every or 1
        if stages > 1 and layers_per_stage(self.config.layers, stages) % every:
            raise MeshError(
                f"{self.config.layers} layers in {stages} stages are {self.config.layers // stages} each, "
                f"but every {every}th layer is global and each stage needs whole groups; choose fewer stages"
            )

        def apply(layers: Any, x: jax.Array, labels: tuple[Any, Any, Any, Any]) -> jax.Array:
            positions, segment_ids, hidden, dropout = labels

            def body(config: TransformerConfig, x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
                x = checkpoint_name(x, _BLOCK_INPUT)
                block, *drop = (layer,) if dropout is None else (layer[0], partial(dropout, layer[1]))
                block = block.configured(config)
                return self._shard(block(x, positions, segment_ids, layout, hidden, *drop)), None

            if self.config.remat != "none":
                body = jax.checkpoint(body, policy=_KEPT[self.config.remat], static_argnums=0)
            return _over_layers(self.config, body, layers, self._shard(x))[0]

        labels = positions, segment_ids, hidden, dropout
        layers = self.blocks if dropout is None else (self.blocks, jnp.arange(self.config.layers))
        if stages > 1:
            return apply_in_stages(apply, layers, x, labels, self.config.rules)
        return apply(layers, x, labels)

    def prefill(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Encodes x [B, T, D] and stores its keys and values in an empty cache."""

        def body(config: TransformerConfig, x: jax.Array, block: Block) -> tuple[jax.Array, Any]:
            x, entries = block.configured(config).prefill(x, positions, segment_ids)
            return self._shard(x), entries

        x, (keys, values) = _over_layers(self.config, body, self.blocks, self._shard(x))
        return x, append_blocks(cache, keys, values, positions, self.config.rules)

    def prefill_chunk(
        self, x: jax.Array, positions: jax.Array, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Encodes the next chunk of a long prompt after the tokens in the cache, and stores it.

        The result equals ``prefill`` of the whole prompt for any chunk sizes; activation memory grows with
        the chunk only. The cache is updated in place if donated.

        Args:
          x: [B, C, D], C sharded over the ring in any order that ``positions`` define; the last chunk
            is padded to a multiple of the ring.
          positions: int32 [B, C]; negative for padding.
          prefix: as in ``extend``.
        """
        return self._extend(attend_chunk, append_blocks, self._shard(x), positions, cache, prefix)

    def store_chunk(self, x: jax.Array, positions: jax.Array, cache: KVCache) -> KVCache:
        """Stores the next chunk as ``prefill_chunk`` does, without its output.

        The last layer then computes keys and values only, as nothing but the output depends on its attention.
        """
        x = self._shard(x)
        return self._extend(attend_chunk, append_blocks, x, positions, cache, None, with_output=False)[1]

    def extend(
        self, x: jax.Array, positions: jax.Array, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Encodes a few new tokens x [B, C, D] after those in the caches, and stores them in ``cache``.

        ``prefix`` is a read-only cache with the first tokens; of batch 1 if they are common to all rows.
        """
        return self._extend(attend_new_tokens, append, x, positions, cache, prefix)

    def encode_after(
        self, x: jax.Array, positions: jax.Array, cache: KVCache, prefix: KVCache | None = None
    ) -> jax.Array:
        """Encodes a few new tokens as ``extend`` does, and stores nothing."""
        return self._extend(attend_new_tokens, lambda cache, *_: cache, x, positions, cache, prefix)[0]

    def _extend(
        self,
        attend: Callable[..., jax.Array],
        store: Callable[..., KVCache],
        x: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        prefix: KVCache | None,
        with_output: bool = True,
    ) -> tuple[jax.Array, KVCache]:
        """Returns the encoded tokens, without output those that the last layer receives, and the cache.

        Layers are not scanned here, because a scan would copy the cache of each layer. The entries of all
        layers are written once at the end, so that a donated cache is updated in place.
        """
        entries = []
        for index in range(self.config.layers):
            block, shared = self.block(index), None if prefix is None else prefix.layer(index)
            if with_output or index + 1 < self.config.layers:
                x, added = block.extend(attend, x, positions, cache.layer(index), shared)
            else:
                added = block.attention.project(x, positions)[1:]
            entries.append(added)
        keys, values = jax.tree.map(partial(_after, x), _stack(entries))
        return x, store(cache, keys, values, positions, self.config.rules)

    def block(self, index: int) -> Block:
        """The block of one layer."""
        blocks = self.blocks
        block = blocks[index] if isinstance(blocks, nnx.List) else jax.tree.map(lambda x: x[index], blocks)
        return block.configured(self.config.of_layer(index))

    def _shard(self, x: jax.Array) -> jax.Array:
        return constrain(x, self.config.rules, "batch", "sequence", None)


def _over_layers(
    config: TransformerConfig,
    body: Callable[[TransformerConfig, jax.Array, Any], tuple[jax.Array, Any]],
    layers: Any,
    x: jax.Array,
) -> tuple[jax.Array, Any]:
    """Applies ``body`` to each layer's configuration, x and the layer; returns the last x and all results.

    ``layers`` is a list of blocks, or a tree of arrays [layers, ...] whose first layer begins a group.
    """
    if isinstance(layers, nnx.List):
        results: list[Any] = [None] * len(layers)
        for index, block in enumerate(layers):
            x, results[index] = body(config.of_layer(index), x, block)
        return x, _stack(results)
    over_local = partial(jax.lax.scan, partial(body, config.local_layers))
    every = config.global_every
    if every is None:
        return over_local(x, layers)

    def over_group(x: jax.Array, group: Any) -> tuple[jax.Array, Any]:
        x, results = over_local(x, jax.tree.map(lambda layers: layers[:-1], group))
        x, result = body(config.global_layers, x, jax.tree.map(lambda layers: layers[-1], group))
        return x, jax.tree.map(lambda first, last: jnp.concatenate([first, last[None]]), results, result)

    count = len(jax.tree.leaves(layers)[0])
    grouped = count - count % every
    groups = jax.tree.map(lambda x: x[:grouped].reshape(-1, every, *x.shape[1:]), layers)
    x, results = jax.lax.scan(over_group, x, groups)
    results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
    if grouped == count:
        return x, results
    x, others = over_local(x, jax.tree.map(lambda x: x[grouped:], layers))
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), results, others)


def _stack(layers: list[Any]) -> Any:
    """One tree of arrays per layer -> one tree of arrays [layers, ...]."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def _after(encoded: jax.Array, entries: jax.Array) -> jax.Array:
    """Returns the entries [layers, B, C, K, H] with a data dependency on ``encoded`` [B, C, D].

    So they are written after every layer has read the cache; otherwise XLA copies the last layer's. (XLA for
    CPUs drops ``jax.lax.optimization_barrier`` before it inserts copies, but not this comparison.)
    """
    never = encoded[:, :, 0] > jnp.inf
    return jnp.where(never[None, :, :, None, None], 0, entries)
