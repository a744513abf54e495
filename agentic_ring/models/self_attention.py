"""Self-attention of a block of the decoder stack, with its norm and projections."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.attention import attention
from agentic_ring.attention.ring.derivative import SAVED_NAMES
from agentic_ring.attention.ring.layout import Layout
from agentic_ring.models.blockwise import gather_param, gather_weight
from agentic_ring.models.layers import RMSNorm, init_weight
from agentic_ring.models.rotary import apply_rotary
from agentic_ring.models.transformer_config import QueryScaling, TransformerConfig

SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
"""Policy of ``jax.checkpoint`` that keeps the output of attention only."""
_PROJECTION = ("embed", "heads", None)
_BIASES = ("query_bias", "key_bias", "value_bias")
_Projections = tuple[tuple[jax.Array, jax.Array | None], ...]
"""Weight [D, N or K, H] and bias [N or K, H], or None, of query, key and value."""


class Attention(nnx.Module):
    """Norm, projections and self-attention."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        query, keys, value, output = jax.random.split(key, 4)
        width, head_dim = config.width, config.head_dim
        self.norm = stack_norm(width, config)
        self.query = init_weight(query, (width, config.heads, head_dim), _PROJECTION, fan_in=width)
        self.key = init_weight(keys, (width, config.key_value_heads, head_dim), _PROJECTION, fan_in=width)
        self.value = init_weight(value, (width, config.key_value_heads, head_dim), _PROJECTION, fan_in=width)
        shape = (config.heads, head_dim, width)
        self.output = init_weight(output, shape, ("heads", None, "embed"), fan_in=config.heads * head_dim)
        if config.projection_bias:
            for name, heads in zip(_BIASES, (config.heads, *[config.key_value_heads] * 2), strict=True):
                setattr(self, name, nnx.Param(jnp.zeros((heads, head_dim)), logical_axes=_PROJECTION[1:]))
        if config.head_norm:
            self.query_norm, self.key_norm = stack_norm(head_dim, config), stack_norm(head_dim, config)
        self.output_norm = stack_norm(width, config) if config.output_norm else None
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
        @partial(jax.checkpoint, policy=SAVE_ATTENTION)
        def attend_with_group(_: None, projections: _Projections) -> tuple[None, jax.Array]:
            query, key, value = self._project(projections, x, positions)
            return None, self.attend_to_rows(query, key, value, positions, segment_ids, layout)

        groups = self.config.head_groups
        if groups == 1:
            query, key, value = self.project(x, positions)
            return self.combine(self.attend_to_rows(query, key, value, positions, segment_ids, layout))
        projections = tuple(
            (self._grouped(weight, axis=1), None if bias is None else self._grouped(bias, axis=0))
            for weight, bias in self._projections
        )
        _, heads = jax.lax.scan(attend_with_group, None, projections)
        output = self._grouped(self.output[...], axis=0)
        output = gather_weight(output, (None, "heads", None, "embed"), self.config.rules, heads.dtype)
        return self._normed(jnp.einsum("gbtnh,gnhd->btd", heads, output))

    def attend_to_rows(
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


def stack_norm(width: int, config: TransformerConfig) -> RMSNorm:
    """A norm over ``width`` features, as the stack's are."""
    return RMSNorm(width, config.norm_epsilon, config.zero_centered_norms)
