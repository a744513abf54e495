"""The decoder stack of all transformer models, with rematerialisation and key/value caches.

Blocks are pre-norm, with rotary positions and a gated feedforward. Their parameters are stacked along a
leading axis and applied by ``lax.scan``: compile time and program size do not grow with depth, and each
layer's weights are gathered inside the scan (FSDP). Where local layers, which have a window, alternate with
global ones, the scan is over groups of layers, with a scan over the local ones of a group inside it. A model
of ``unstack_layers`` has a list of blocks. On a mesh with stages, whole sequences pass through the layers
stage by stage (``models.pipeline``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from agentic_ring.attention import MaskSpec, Strategy, attention
from agentic_ring.attention.cache import CachedAttentionInputs, CachedLayer, KVCache, append, append_blocks
from agentic_ring.attention.cache.chunked_prefill import attend_chunk
from agentic_ring.attention.cache.decode import attend_new_tokens
from agentic_ring.attention.kernels.registry import KERNELS
from agentic_ring.attention.options import STRATEGIES
from agentic_ring.attention.ring.derivative import SAVED_NAMES
from agentic_ring.attention.ring.layout import Layout
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ConfigError, MeshError, check_at_least_one, check_choice, check_positive
from agentic_ring.mesh import ShardingRules, constrain
from agentic_ring.models.blockwise import gather_param, gather_weight
from agentic_ring.models.layers import ACTIVATIONS, Activation, FeedForward, RMSNorm, init_weight
from agentic_ring.models.pipeline import ambient_stages, apply_in_stages, layers_per_stage
from agentic_ring.models.residual_dropout import ResidualDropout
from agentic_ring.models.rotary import DynamicScaling, RotaryScaling, apply_rotary

_MAX_LAYERS = 10_000
_PROJECTION = ("embed", "heads", None)
_BIASES = ("query_bias", "key_bias", "value_bias")
_BLOCK_INPUT = "block_input"
_SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
_KEPT = {
    "full": None,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "attention": _SAVE_ATTENTION,
}
"""Rematerialisation policy of one block for ``jax.checkpoint``, by ``TransformerConfig.remat``."""


@dataclass(frozen=True)
class QueryScaling:
    """Scales queries with the logarithm of their position, as in Llama 4.

    Softmax over more keys is flatter; larger scores compensate for it (arXiv 2501.19399). A query at
    position p is multiplied by 1 + ``scale`` ln(1 + floor((p + 1) / ``floor``)).
    """

    floor: int
    """Queries at positions below ``floor - 1`` are unchanged."""
    scale: float

    def __post_init__(self) -> None:
        check_at_least_one(self, "floor")
        check_positive(self, "scale")


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes, dtype, rematerialisation and sharding of the stack."""

    width: int
    """Model width D."""
    layers: int
    heads: int
    """Query heads N."""
    ffn_width: int
    """Hidden width of the gated feedforward."""
    kv_heads: int | None = None
    """Key/value heads K, a divisor of ``heads``; None is one per query head."""
    head_size: int | None = None
    """Width of one head; None is ``width`` over ``heads``."""
    rope_theta: float = 10_000.0
    rope_scaling: RotaryScaling | None = None
    """Method that extends rotary positions beyond the context of pre-training."""
    query_scaling: QueryScaling | None = None
    window: int | None = None
    """Tokens that a token attends to, itself and those before it; None is all."""
    global_every: int | None = None
    """Layers in a group whose last one is global and attends to all tokens. The others are local: they have
    the window. With None all layers are local."""
    local_rope_theta: float | None = None
    """Base of rotary positions in local layers, where they are not scaled; None is as in all layers."""
    query_pre_attn_scalar: float | None = None
    """Products of queries and keys are divided by its root; None is the width of a head."""
    attention_cap: float | None = None
    """Soft cap of attention's scores; None is none."""
    projection_bias: bool = False
    """Whether queries, keys and values have a bias."""
    head_norm: bool = False
    """Whether each head of queries and keys is normalised before it is rotated."""
    norm_epsilon: float = 1e-5
    zero_centered_norms: bool = False
    """Whether the scales of norms are stored less 1."""
    output_norm: bool = False
    """Whether what attention and feedforward add is normalised."""
    activation: Activation = "silu"
    """Activation function of the feedforward's gate."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters and optimiser state are always float32."""
    remat: Literal["full", "offload", "attention", "none"] = "full"
    """Rematerialisation. "full" keeps only the input of each block, as the paper does, and recomputes the
    rest in the backward pass; "offload" keeps that input in host memory; "attention" also keeps the output of
    attention, which avoids the costliest recomputation for one more [B, T, D] per layer; "none" keeps all."""
    head_groups: int = 1
    """Groups of heads that attention processes one after the other in training, so that queries, keys, values
    and the buffers of the ring are in memory for one group at a time."""
    ffn_chunk: int | None = None
    """Tokens per device in the feedforward at a time (blockwise); None is all of them."""
    attention_strategy: Strategy | Literal["auto"] = "auto"
    attention_kernel: str = "auto"
    rules: ShardingRules = ShardingRules()

    def __post_init__(self) -> None:
        if self.layers != 0:  # a model without layers tells what the rest of it costs
            check_at_least_one(self, "layers", at_most=_MAX_LAYERS)
        optional = (
            name
            for name in ("kv_heads", "head_size", "window", "global_every", "ffn_chunk")
            if getattr(self, name) is not None
        )
        check_at_least_one(self, "width", "heads", "ffn_width", "head_groups", *optional)
        scalars = ("local_rope_theta", "query_pre_attn_scalar", "attention_cap")
        check_positive(self, "rope_theta", *(name for name in scalars if getattr(self, name) is not None))
        check_positive(self, "norm_epsilon", below=1.0)
        check_choice(self, "dtype", ("float32", "bfloat16"))
        check_choice(self, "activation", ACTIVATIONS)
        for name in ("global_every", "local_rope_theta"):
            if self.window is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is {getattr(self, name)}, but local layers need a window")
        check_choice(self, "remat", (*_KEPT, "none"))
        check_choice(self, "attention_strategy", ("auto", *STRATEGIES))
        check_choice(self, "attention_kernel", KERNELS)
        if (self.head_size is None and self.width % self.heads) or self.head_dim % 2:
            raise ConfigError(
                f"width {self.width} over {self.heads} heads does not give an even head dimension; "
                "choose a width that is an even multiple of heads, or an even head_size"
            )
        if isinstance(self.rope_scaling, DynamicScaling) and self.head_dim < 4:
            raise ConfigError("dynamic rotary scaling needs a head dimension of at least 4; this one is 2")
        if self.heads % self.key_value_heads:
            raise ConfigError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.key_value_heads % self.head_groups:
            raise ConfigError(
                f"head_groups {self.head_groups} does not divide the {self.key_value_heads} key/value heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head, H."""
        return self.head_size or self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Key/value heads K."""
        return self.kv_heads or self.heads

    @property
    def mask(self) -> MaskSpec:
        """Which tokens a token attends to in a stack of one kind of layer."""
        return MaskSpec(causal=True, window=self.window)

    @property
    def scores(self) -> Scores:
        """Scale and soft cap of attention's scores."""
        return Scores((self.query_pre_attn_scalar or self.head_dim) ** -0.5, self.attention_cap)

    @property
    def local_layers(self) -> "TransformerConfig":
        """Configuration of the layers that have the window, as a stack of only these."""
        if self.local_rope_theta is None:
            return replace(self, global_every=None)
        theta = self.local_rope_theta
        return replace(self, global_every=None, local_rope_theta=None, rope_theta=theta, rope_scaling=None)

    @property
    def global_layers(self) -> "TransformerConfig":
        """Configuration of the layers that attend to all tokens, as a stack of only these."""
        return replace(self, window=None, global_every=None, local_rope_theta=None)

    def of_layer(self, index: int) -> "TransformerConfig":
        """Configuration of one layer, as a stack of only such layers."""
        if self.global_every is not None and (index + 1) % self.global_every == 0:
            return self.global_layers
        return self.local_layers


_Projections = tuple[tuple[jax.Array, jax.Array | None], ...]
"""Weight [D, N or K, H] and bias [N or K, H], or None, of query, key and value."""


class Attention(nnx.Module):
    """Norm, projections and self-attention."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        query, keys, value, output = jax.random.split(key, 4)
        width, head_dim = config.width, config.head_dim
        self.norm = _norm(width, config)
        self.query = init_weight(query, (width, config.heads, head_dim), _PROJECTION, fan_in=width)
        self.key = init_weight(keys, (width, config.key_value_heads, head_dim), _PROJECTION, fan_in=width)
        self.value = init_weight(value, (width, config.key_value_heads, head_dim), _PROJECTION, fan_in=width)
        shape = (config.heads, head_dim, width)
        self.output = init_weight(output, shape, ("heads", None, "embed"), fan_in=config.heads * head_dim)
        if config.projection_bias:
            for name, heads in zip(_BIASES, (config.heads, *[config.key_value_heads] * 2), strict=True):
                setattr(self, name, nnx.Param(jnp.zeros((heads, head_dim)), logical_axes=_PROJECTION[1:]))
        if config.head_norm:
            self.query_norm, self.key_norm = _norm(head_dim, config), _norm(head_dim, config)
        self.output_norm = _norm(width, config) if config.output_norm else None
        self.config = config

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects x [B, T, D] to rotated query [B, T, N, H], rotated key and value [B, T, K, H]."""
        return self._project(self._projections, x, positions)

    def combine(self, heads: jax.Array) -> jax.Array:
        """Output projection, and its norm: heads [B, T, N, H] -> [B, T, D]."""
        output = gather_param(self.output, self.config.rules, heads.dtype)
        return self._normed(jnp.einsum("btnh,nhd->btd", heads, output))

    def _normed(self, added: jax.Array) -> jax.Array:
        return added if self.output_norm is None else self.output_norm(added)

    def __call__(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None, layout: Layout | None
    ) -> jax.Array:
        """Self-attention of x [B, T, D]; arguments as in ``Transformer``."""

        # Everything in a group but the output of attention is recomputed for its derivative.
        @partial(jax.checkpoint, policy=_SAVE_ATTENTION)
        def attend(_: None, projections: _Projections) -> tuple[None, jax.Array]:
            query, key, value = self._project(projections, x, positions)
            return None, self.attend(query, key, value, positions, segment_ids, layout)

        groups = self.config.head_groups
        if groups == 1:
            query, key, value = self.project(x, positions)
            return self.combine(self.attend(query, key, value, positions, segment_ids, layout))
        projections = tuple(
            (self._grouped(weight, axis=1), None if bias is None else self._grouped(bias, axis=0))
            for weight, bias in self._projections
        )
        _, heads = jax.lax.scan(attend, None, projections)
        output = self._grouped(self.output[...], axis=0)
        output = gather_weight(output, (None, "heads", None, "embed"), self.config.rules, heads.dtype)
        return self._normed(jnp.einsum("gbtnh,gnhd->btd", heads, output))

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        layout: Layout | None,
    ) -> jax.Array:
        """Causal self-attention of each row, [B, T, N, H]; arguments as in ``Transformer``."""
        config = self.config
        # With a known layout no positions are passed: kernels derive them and skip masked blocks.
        if config.attention_strategy == "local":
            layout = None
        return attention(
            query,
            key,
            value,
            rules=config.rules,
            mask=config.mask,
            scale=config.scores.scale,
            soft_cap=config.scores.soft_cap,
            segment_ids=segment_ids,
            positions=positions if layout is None else None,
            layout=layout or "auto",
            permuted=layout is not None,
            strategy=config.attention_strategy,
            kernel=config.attention_kernel,
        )

    @property
    def _projections(self) -> _Projections:
        weights = (self.query[...], self.key[...], self.value[...])
        biases = (getattr(self, name)[...] if self.config.projection_bias else None for name in _BIASES)
        return tuple(zip(weights, biases, strict=True))

    def _project(
        self, projections: _Projections, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        x = self.norm(x)

        def project(weight: jax.Array, bias: jax.Array | None) -> jax.Array:
            heads = jnp.einsum("btd,dnh->btnh", x, gather_weight(weight, _PROJECTION, config.rules, x.dtype))
            if bias is None:
                return heads
            return heads + gather_weight(bias, _PROJECTION[1:], config.rules, x.dtype)

        query, key, value = (project(weight, bias) for weight, bias in projections)
        if config.head_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (
            apply_rotary(x, positions, config.rope_theta, config.rope_scaling) for x in (query, key)
        )
        if config.query_scaling is not None:
            query = _scale_queries(query, positions, config.query_scaling)
        return query, key, value

    def _grouped(self, weight: jax.Array, axis: int) -> jax.Array:
        """Splits the heads along ``axis`` of a weight into groups, stacked along a new first axis.

        A group takes every ``head_groups``-th key head with its query heads, so that each group uses heads
        of every device.
        """
        groups, key_heads = self.config.head_groups, self.config.key_value_heads
        before, after = weight.shape[:axis], weight.shape[axis + 1 :]
        parts = weight.reshape(*before, key_heads // groups, groups, -1, *after)
        return jnp.moveaxis(parts, axis + 1, 0).reshape(groups, *before, -1, *after)


def _scale_queries(query: jax.Array, positions: jax.Array, scaling: QueryScaling) -> jax.Array:
    """Scales queries [B, T, N, H] by their positions [B, T] or [1, T]; see ``QueryScaling``."""
    passed = ((positions + 1) // scaling.floor).astype(jnp.float32)
    factor = 1.0 + scaling.scale * jnp.log1p(jnp.maximum(passed, 0.0))
    return (query.astype(jnp.float32) * factor[..., None, None]).astype(query.dtype)


def _norm(width: int, config: TransformerConfig) -> RMSNorm:
    return RMSNorm(width, config.norm_epsilon, config.zero_centered_norms)


class Block(nnx.Module):
    """Attention and feedforward, each with pre-norm and residual connection."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        attention_key, feedforward_key = jax.random.split(key)
        self.attention = Attention(attention_key, config)
        self.feedforward = FeedForward(
            feedforward_key,
            config.width,
            config.ffn_width,
            config.ffn_chunk,
            config.rules,
            config.norm_epsilon,
            config.zero_centered_norms,
            config.output_norm,
            config.activation,
        )
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
        drop: Callable[[int, jax.Array], jax.Array] = lambda branch, added: added,
    ) -> jax.Array:
        """Returns the output for x [B, T, D]; arguments as in ``Transformer``.

        ``drop`` is applied to what attention (branch 0) and feedforward (branch 1) add to x.
        """
        x = x + drop(0, self.attention(x, positions, segment_ids, layout))
        return self.feedforward(x, partial(drop, 1))

    def prefill(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the output for x [B, T, D], and the keys and values [B, T, K, H]."""
        query, key, value = self.attention.project(x, positions)
        heads = self.attention.attend(query, key, value, positions, segment_ids, None)
        return self.feedforward(x + self.attention.combine(heads)), (key, value)

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
        self.blocks: Block | nnx.List[Block] = jax.vmap(lambda k: Block(k, config))(
            jax.random.split(key, config.layers)
        )
        self.norm = _norm(config.width, config)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None = None,
        layout: Layout | None = None,
        dropout: ResidualDropout | None = None,
    ) -> jax.Array:
        """Encodes whole sequences.

        Args:
          x: [B, T, D], T sharded over the ring.
          positions: int32 [B, T] or [1, T], for rotary embeddings, and for the mask if ``layout`` is None.
          segment_ids: int32 [B, T]; tokens attend within their segment, negative is padding.
          layout: order of each sequence over the ring; None if only ``positions`` define it, which is slower.
          dropout: applied to what each residual branch adds; None drops nothing.

        Raises:
          MeshError: the layers, their groups or the rows do not divide over the mesh's stages.
        """
        stages, every = ambient_stages(self.config.rules), self.config.global_every or 1
        if stages > 1 and layers_per_stage(self.config.layers, stages) % every:
            raise MeshError(
                f"{self.config.layers} layers in {stages} stages are {self.config.layers // stages} each, "
                f"but every {every}th layer is global and each stage needs whole groups; choose fewer stages"
            )

        def apply(layers: Any, x: jax.Array, labels: tuple[Any, Any, ResidualDropout | None]) -> jax.Array:
            positions, segment_ids, dropout = labels

            def body(config: TransformerConfig, x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
                x = checkpoint_name(x, _BLOCK_INPUT)
                if dropout is None:
                    return self._shard(layer.configured(config)(x, positions, segment_ids, layout)), None
                block, index = layer
                drop = partial(dropout, index)
                return self._shard(block.configured(config)(x, positions, segment_ids, layout, drop)), None

            if self.config.remat != "none":
                body = jax.checkpoint(body, policy=_KEPT[self.config.remat], static_argnums=0)
            return _over_layers(self.config, body, layers, self._shard(x))[0]

        labels = positions, segment_ids, dropout
        layers = self.blocks if dropout is None else (self.blocks, jnp.arange(self.config.layers))
        if stages == 1:
            return apply(layers, x, labels)
        return apply_in_stages(apply, layers, x, labels, self.config.rules)

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
        the chunk only.

        Args:
          x: [B, C, D], C sharded over the ring in any order that ``positions`` define; the last chunk
            is padded to a multiple of the ring.
          positions: int32 [B, C]; negative for padding.
          cache: updated in place if donated.
          prefix: a cache with the first tokens; of batch 1 if they are common to all rows.
        """
        x, keys, values = self._extend(attend_chunk, self._shard(x), positions, cache, prefix)
        return x, append_blocks(cache, keys, values, positions, self.config.rules)

    def store_chunk(self, x: jax.Array, positions: jax.Array, cache: KVCache) -> KVCache:
        """Stores the next chunk as ``prefill_chunk`` does, without its output.

        The last layer then computes keys and values only, as nothing but the output depends on its attention.
        """
        x = self._shard(x)
        _, keys, values = self._extend(attend_chunk, x, positions, cache, None, with_output=False)
        return append_blocks(cache, keys, values, positions, self.config.rules)

    def extend(
        self, x: jax.Array, positions: jax.Array, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Encodes a few new tokens x [B, C, D] after those in the caches, and stores them in ``cache``.

        ``prefix`` is a read-only cache with the first tokens; of batch 1 if they are common to all rows.
        """
        x, keys, values = self._extend(attend_new_tokens, x, positions, cache, prefix)
        return x, append(cache, keys, values, positions, self.config.rules)

    def _extend(
        self,
        attend: Callable[..., jax.Array],
        x: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        prefix: KVCache | None,
        with_output: bool = True,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the encoded tokens [B, C, D], and the keys and values [layers, B, C, K, H] of all layers.

        Without output the tokens are those that the last layer receives.

        Layers are not scanned here, because a scan would copy the cache of each layer before reading it. The
        caches are only read; the entries of all layers are written once at the end, so that a donated cache
        is updated in place.
        """
        entries = []
        for index in range(self.config.layers):
            block, shared = self.block(index), None if prefix is None else prefix.layer(index)
            if with_output or index + 1 < self.config.layers:
                x, added = block.extend(attend, x, positions, cache.layer(index), shared)
            else:
                _, *added = block.attention.project(x, positions)
            entries.append(tuple(added))
        keys, values = jax.tree.map(partial(_after, x), _stack(entries))
        return x, keys, values

    def block(self, index: int) -> Block:
        """The block of one layer."""
        if isinstance(self.blocks, nnx.List):
            block = self.blocks[index]
        else:
            block = jax.tree.map(lambda x: x[index], self.blocks)
        return block.configured(self.config.of_layer(index))

    def _shard(self, x: jax.Array) -> jax.Array:
        return constrain(x, self.config.rules, "batch", "sequence", None)


def _over_layers(
    config: TransformerConfig,
    body: Callable[[TransformerConfig, jax.Array, Any], tuple[jax.Array, Any]],
    layers: Any,
    x: jax.Array,
) -> tuple[jax.Array, Any]:
    """Applies ``body`` to the configuration of each layer, x [B, T, D] and the layer.

    Args:
      layers: a list of blocks, or a tree of arrays [layers, ...] whose first layer begins a group.

    Returns:
      The last x and the stacked results.
    """
    if isinstance(layers, nnx.List):
        results = []
        for index, block in enumerate(layers):
            x, result = body(config.of_layer(index), x, block)
            results.append(result)
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

    They are then written after every layer has read the cache. Without it XLA copies the cache of the last
    layer at each call, since it could be written while it is read. (XLA for CPUs drops
    ``jax.lax.optimization_barrier`` before it inserts copies, but keeps a comparison with infinity.)
    """
    never = encoded[:, :, 0] > jnp.inf
    return jnp.where(never[None, :, :, None, None], 0, entries)
