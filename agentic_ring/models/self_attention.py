"""Self-attention of a block of the decoder stack, with its norms, projections and rotary positions.

Rotary positions (arXiv 2104.09864) are exact beyond a million tokens. An angle is position x frequency modulo
one turn; its float32 product has an error of up to 0.05 at position 524,288. Here integers are used instead:
a frequency is a 32-bit fraction of a turn, products wrap around at full turns, and positions are split into
8-bit digits, so that the rounding error of a frequency is multiplied by at most 255. The remaining error is
below 1e-6 at every position under 16 million.
"""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from agentic_ring.attention import attention
from agentic_ring.attention.ring.derivative import SAVED_NAMES
from agentic_ring.attention.ring.layout import Layout
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import mesh_platform
from agentic_ring.models.layers import gather_param, gather_weight, init_weight, stack_norm
from agentic_ring.models.low_rank import multiply
from agentic_ring.models.transformer_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    TransformerConfig,
    YarnScaling,
)

SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
"""Policy of ``jax.checkpoint`` that keeps the output of attention only."""
_PROJECTION = ("embed", "heads", None)
_BIASES = ("query_bias", "key_bias", "value_bias")
_Projections = tuple[tuple[Any, jax.Array | None], ...]
"""Weight [D, N or K, H], an array or low-rank, and bias [N or K, H], or None, of query, key and value."""
_Heads = tuple[jax.Array, jax.Array, jax.Array]
_DIGIT_BITS = 8


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

    def combine(self, heads: jax.Array) -> jax.Array:
        """Output projection, and its norm: heads [B, T, N, H] -> [B, T, D]."""
        output = gather_param(self.output, self.config.rules, heads.dtype)
        return self._normed(multiply(heads, output, inputs=2))

    def _normed(self, added: jax.Array) -> jax.Array:
        return added if self.output_norm is None else self.output_norm(added)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        layout: Layout | None,
        hidden: jax.Array | None = None,
    ) -> jax.Array:
        """Self-attention of x [B, T, D]; arguments as in ``Transformer``."""

        def attend(projections: _Projections) -> jax.Array:
            heads = self.project(x, positions, projections)
            return self.attend_to_rows(heads, positions, segment_ids, layout, hidden)

        groups = self.config.head_groups
        if groups == 1:
            return self.combine(attend(self._projections))
        projections = tuple(
            (self._grouped(weight[...], axis=1), None if bias is None else self._grouped(bias, axis=0))
            for weight, bias in self._projections
        )
        # Everything in a group but the output of attention is recomputed for its derivative.
        recomputed = jax.checkpoint(attend, policy=SAVE_ATTENTION)
        _, heads = jax.lax.scan(lambda _, group: (None, recomputed(group)), None, projections)
        output = self._grouped(self.output[...], axis=0)
        output = gather_weight(output, (None, "heads", None, "embed"), self.config.rules, heads.dtype)
        return self._normed(jnp.einsum("gbtnh,gnhd->btd", heads, output))

    def attend_to_rows(
        self,
        heads: _Heads,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        layout: Layout | None,
        hidden: jax.Array | None = None,
    ) -> jax.Array:
        """Causal self-attention of each row, [B, T, N, H]; arguments as in ``Transformer``."""
        config = self.config
        # With a known layout no positions are passed: kernels derive them and skip masked blocks.
        if config.attention_strategy == "local":
            layout = None
        return attention(
            *heads,
            rules=config.rules,
            mask=config.mask,
            scale=config.scores.scale,
            soft_cap=config.scores.soft_cap,
            segment_ids=segment_ids,
            positions=positions if layout is None else None,
            hidden_rows=hidden,
            layout=layout or "auto",
            permuted=layout is not None,
            strategy=config.attention_strategy,
            kernel=config.attention_kernel,
        )

    @property
    def _projections(self) -> _Projections:
        weights = (weight.get_value() for weight in (self.query, self.key, self.value))
        biases = (getattr(self, name)[...] if self.config.projection_bias else None for name in _BIASES)
        return tuple(zip(weights, biases, strict=True))

    def project(self, x: jax.Array, positions: jax.Array, projections: _Projections | None = None) -> _Heads:
        """Projects x [B, T, D] to rotated query [B, T, N, H], rotated key and value [B, T, K, H]."""
        config = self.config
        x = self.norm(x)

        def project(weight: Any, bias: jax.Array | None) -> jax.Array:
            heads = multiply(x, gather_weight(weight, _PROJECTION, config.rules, x.dtype))
            if bias is None:
                return heads
            return heads + gather_weight(bias, _PROJECTION[1:], config.rules, x.dtype)

        query, key, value = (project(weight, bias) for weight, bias in projections or self._projections)
        if config.head_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (
            apply_rotary(x, positions, config.rope_theta, config.rope_scaling) for x in (query, key)
        )
        if config.query_scaling is not None:
            passed = ((positions + 1) // config.query_scaling.floor).astype(jnp.float32)
            factor = 1.0 + config.query_scaling.scale * jnp.log1p(jnp.maximum(passed, 0.0))
            query = (query.astype(jnp.float32) * factor[..., None, None]).astype(query.dtype)
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


def apply_rotary(
    x: jax.Array, positions: jax.Array, theta: float, scaling: RotaryScaling | None = None
) -> jax.Array:
    """Rotates the two halves of each head of x [B, T, N, H] by its position, in x's dtype.

    Args:
      positions: int32 [B, T] or [1, T].
      theta: base; the longest wavelength is 2 pi theta tokens before scaling.

    Raises:
      ArgumentError: x is float64; the angles have errors of up to 1e-6.
    """
    if x.dtype == jnp.float64:
        raise ArgumentError("rotary positions are computed in float32, but x is float64; cast it to float32")
    place = positions[..., None, None].astype(jnp.uint32)
    fractions = jnp.zeros((), jnp.uint32)
    for digit, frequency in enumerate(_turns(theta, x.shape[-1], scaling)):
        fractions += ((place >> (_DIGIT_BITS * digit)) & (2**_DIGIT_BITS - 1)) * jnp.asarray(frequency)
    factor = attention_factor(scaling)

    def wave(behind: jax.Array) -> jax.Array:
        # Read as a signed integer, a fraction of a turn is an angle between minus half and half a turn.
        angles = (fractions - behind).astype(jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
        return factor * jnp.cos(angles)

    # XLA for CPUs would recompute the waves for every head, which takes longer than everything else here;
    # the result of a loop is computed once.
    behind = jnp.array([0, 2**30], jnp.uint32)  # a quarter turn
    cos, sin = jax.lax.map(wave, behind) if mesh_platform() == "cpu" else jax.vmap(wave)(behind)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@cache
def _turns(theta: float, head_dim: int, scaling: RotaryScaling | None) -> np.ndarray:
    """uint32 [digits, H / 2]: rotation of each wave per unit of each 8-bit digit, in 2**-32 of a turn."""
    turns = inverse_frequencies(theta, head_dim, scaling) / (2 * math.pi)
    digits = turns * 2.0 ** (_DIGIT_BITS * np.arange(4)[:, None])
    return np.round(np.mod(digits, 1.0) * 2.0**32).astype(np.uint64).astype(np.uint32)


def attention_factor(scaling: RotaryScaling | None) -> float:
    """Factor of rotated queries and keys."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def inverse_frequencies(theta: float, head_dim: int, scaling: RotaryScaling | None) -> np.ndarray:
    """Radians per token of each wave, the fastest first: float64 [H / 2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = theta**-exponents
    match scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case DynamicScaling():
            return scaling.base(theta, head_dim) ** -exponents
        case YarnScaling(factor):
            kept = 1 - _yarn_ramp(theta, head_dim, scaling)
        case Llama3Scaling(factor, low, high, original):
            kept = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return plain * kept + plain / factor * (1 - kept)


def _yarn_ramp(theta: float, head_dim: int, scaling: YarnScaling) -> np.ndarray:
    """Fraction of each wave that is stretched, 0 to 1: float64 [H / 2]."""

    def wave_with(turns: float) -> float:
        """Index of the wave that makes ``turns`` turns in the original context."""
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = wave_with(scaling.beta_fast), wave_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
