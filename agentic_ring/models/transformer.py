"""The decoder stack that every model of the project stands on.

Blocks are pre-norm, with rotary positions and a gated feedforward. Their parameters are stacked
along a leading axis and applied by ``lax.scan``: compile time and program size do not grow with
depth, and each layer's weights are gathered inside the scan, one layer at a time (FSDP).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.attention import MaskSpec, Strategy, attention
from agentic_ring.attention.cache import CachedLayer, KVCache, append, append_blocks
from agentic_ring.attention.chunked_prefill import attend_chunk
from agentic_ring.attention.decode import attend
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import ShardingRules, constrain
from agentic_ring.models.layers import FeedForward, RMSNorm, gathered, rotary, weight


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and computation of the stack."""

    width: int
    """Model width D."""
    layers: int
    heads: int
    """Query heads N."""
    ffn_width: int
    """Hidden width of the gated feedforward."""
    kv_heads: int | None = None
    """Key/value heads K, a divisor of ``heads``; None is one for each query head."""
    rope_theta: float = 10_000.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters and optimiser state are float32 always."""
    remat: Literal["full", "none"] = "full"
    """What the backward pass recomputes: "full" keeps only each block's input, as the paper does."""
    ffn_chunk: int | None = None
    """Tokens a device puts through the feedforward at a time (blockwise); None is all of them."""
    attention_strategy: Strategy | Literal["auto"] = "auto"
    attention_kernel: str = "auto"
    rules: ShardingRules = ShardingRules()

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"width {self.width} over {self.heads} heads does not give an even head dimension; "
                "choose a width that is an even multiple of heads"
            )
        if self.heads % self.key_value_heads:
            raise ConfigError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    @property
    def head_dim(self) -> int:
        """Width of one head, H."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Key/value heads K."""
        return self.kv_heads or self.heads


class Attention(nnx.Module):
    """Projections round the attention library."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        query, keys, value, output = jax.random.split(key, 4)
        width, head_dim = config.width, config.head_dim
        projection = ("embed", "heads", None)
        self.query = weight(query, (width, config.heads, head_dim), projection, fan_in=width)
        self.key = weight(keys, (width, config.key_value_heads, head_dim), projection, fan_in=width)
        self.value = weight(value, (width, config.key_value_heads, head_dim), projection, fan_in=width)
        self.output = weight(output, (config.heads, head_dim, width), ("heads", None, "embed"), fan_in=width)
        self.config = config

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """From x [B, T, D]: rotated query [B, T, N, H] and key, and value [B, T, K, H]."""
        rules, theta = self.config.rules, self.config.rope_theta
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", x, gathered(p, rules, x.dtype))
            for p in (self.query, self.key, self.value)
        )
        return rotary(query, positions, theta), rotary(key, positions, theta), value

    def combine(self, heads: jax.Array) -> jax.Array:
        """Heads [B, T, N, H] -> [B, T, D]."""
        return jnp.einsum("btnh,nhd->btd", heads, gathered(self.output, self.config.rules, heads.dtype))


class Block(nnx.Module):
    """Attention and feedforward, each behind a norm and beside a residual path."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        attention_key, feedforward_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(attention_key, config)
        self.feedforward_norm = RMSNorm(config.width)
        self.feedforward = FeedForward(
            feedforward_key, config.width, config.ffn_width, config.ffn_chunk, config.rules
        )
        self.config = config

    def __call__(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The block's output for x [B, T, D], and the keys and values [B, T, K, H] it attended to."""
        query, key, value = self.attention.project(self.attention_norm(x), positions)
        heads = attention(
            query,
            key,
            value,
            mask=MaskSpec(causal=True),
            positions=positions,
            segment_ids=segment_ids,
            strategy=self.config.attention_strategy,
            kernel=self.config.attention_kernel,
        )
        return self._finish(x, heads), (key, value)

    def extend(
        self,
        attend: Callable[..., jax.Array],
        x: jax.Array,
        positions: jax.Array,
        past: CachedLayer,
        prefix: CachedLayer | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Like calling the block on new tokens x [B, C, D], with the cached ones as their past.

        ``attend`` is ``decode.attend`` or, where C is sharded, ``chunked_prefill.attend_chunk``.
        """
        query, key, value = self.attention.project(self.attention_norm(x), positions)
        heads = attend(query, key, value, positions, past, self.config.rules, prefix=prefix)
        return self._finish(x, heads), (key, value)

    def _finish(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        x = x + self.attention.combine(heads)
        return x + self.feedforward(self.feedforward_norm(x))


class Transformer(nnx.Module):
    """Stacked blocks and a final norm; embeddings and heads belong to the models."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        self.blocks = jax.vmap(lambda k: Block(k, config))(jax.random.split(key, config.layers))
        self.norm = RMSNorm(config.width)
        self.config = config

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Encodes whole sequences.

        Args:
          x: [B, T, D], T sharded over the ring in any layout that ``positions`` describe.
          positions: int32 [B, T].
          segment_ids: int32 [B, T], negative for padding; None when there is none.
        """

        def body(x: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return self._shard(block(x, positions, segment_ids)[0]), None

        if self.config.remat == "full":
            body = jax.checkpoint(body)
        return self.norm(jax.lax.scan(body, self._shard(x), self.blocks)[0])

    def prefill(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Encodes x [B, T, D] by the ring and stores its keys and values in an empty cache."""

        def body(x: jax.Array, block: Block) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            x, entries = block(x, positions, segment_ids)
            return self._shard(x), entries

        x, (keys, values) = jax.lax.scan(body, self._shard(x), self.blocks)
        return self.norm(x), append_blocks(cache, keys, values, positions, self.config.rules)

    def prefill_chunk(
        self, x: jax.Array, positions: jax.Array, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Encodes the next chunk of a long prompt after all that the cache holds, and stores it.

        Prefilling by chunks of any sizes gives what ``prefill`` of the whole gives, and memory beside
        the cache that grows with the chunk alone.

        Args:
          x: [B, C, D], C sharded over the ring in any layout that ``positions`` describe; a last chunk
            is padded to a multiple of the ring.
          positions: int32 [B, C]; negative for padding.
          cache: donate it, and it is updated in place.
          prefix: a cache of batch 1 that holds what comes before in every row.
        """
        x, keys, values = self._extend(attend_chunk, self._shard(x), positions, cache, prefix)
        return x, append_blocks(cache, keys, values, positions, self.config.rules)

    def extend(
        self, x: jax.Array, positions: jax.Array, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Encodes a few new tokens x [B, C, D] after all that the caches hold, and stores them in ``cache``.

        ``prefix`` is a cache of batch 1 that holds what comes before in every row; it is only read.
        """
        x, keys, values = self._extend(attend, x, positions, cache, prefix)
        return x, append(cache, keys, values, positions, self.config.rules)

    def _extend(
        self,
        attend: Callable[..., jax.Array],
        x: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        prefix: KVCache | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The encoded tokens [B, C, D], and the keys and values [layers, B, C, K, H] of all layers.

        Layers are not scanned here, as a scan would copy each layer's cache before reading it. The
        caches are only read; what all layers add is written once, at the end, so that a donated cache
        is updated in place.
        """
        entries = []
        for index in range(self.config.layers):
            block = jax.tree.map(lambda x, index=index: x[index], self.blocks)
            shared = None if prefix is None else prefix.layer(index)
            x, added = block.extend(attend, x, positions, cache.layer(index), shared)
            entries.append(added)
        keys, values = jax.tree.map(lambda *layers: jnp.stack(layers), *entries)
        return self.norm(x), keys, values

    def _shard(self, x: jax.Array) -> jax.Array:
        return constrain(x, self.config.rules, "batch", "sequence", None)
