"""Rotary position embeddings (arXiv 2104.09864), exact beyond a million tokens, and their scaling methods.

An angle is position x frequency modulo one turn. Its float32 product has an error of up to 0.05 at position
524,288. Here integers are used instead: a frequency is a 32-bit fraction of a turn, products wrap around at
full turns, and positions are split into 8-bit digits, so that the rounding error of a frequency is multiplied
by at most 255. The remaining error is below 1e-6 at every position under 16 million.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.errors import ArgumentError, ConfigError, check_at_least_one, check_positive
from agentic_ring.mesh import mesh_platform

_DIGIT_BITS = 8
_DIGITS = 4
_QUARTER_TURN = 2**30


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (arXiv 2306.15595)."""

    factor: float
    rope_type: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        check_positive(self, "factor")


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with the context ("dynamic NTK").

    Frequencies depend on ``context`` only, not on the tokens seen so far; otherwise the cache of a document
    would depend on its division into chunks.
    """

    factor: float
    original_context: int
    """Context in training, in tokens."""
    context: int
    """Context in use, in tokens."""
    rope_type: Literal["dynamic"] = "dynamic"

    def __post_init__(self) -> None:
        check_positive(self, "factor")
        check_at_least_one(self, "original_context", "context")


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): long wavelengths are stretched, short ones kept, scores are sharpened."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    """Turns within ``original_context`` above which a wave is kept."""
    beta_slow: float = 1.0
    """Turns below which it is stretched by ``factor``."""
    attention_factor: float | None = None
    """Factor of rotated queries and keys; None is 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Whether the bounds between kept and stretched waves are rounded outwards to whole waves."""
    rope_type: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        optional = () if self.attention_factor is None else ("attention_factor",)
        check_positive(self, "factor", "beta_fast", "beta_slow", *optional)
        check_at_least_one(self, "original_context")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched, short ones kept, with a linear ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    rope_type: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        check_at_least_one(self, "original_context")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor {self.high_freq_factor} of llama3 rotary scaling must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )


RotaryScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


def apply_rotary(
    x: jax.Array, positions: jax.Array, theta: float, scaling: RotaryScaling | None = None
) -> jax.Array:
    """Rotates the two halves of each head by its position.

    Args:
      x: [B, T, N, H], H even.
      positions: int32 [B, T] or [1, T].
      theta: base; the longest wavelength is 2 pi theta tokens before scaling.

    Returns:
      [B, T, N, H] in x's dtype.

    Raises:
      ArgumentError: x is float64; the angles have errors of up to 1e-6.
    """
    if x.dtype == jnp.float64:
        raise ArgumentError("rotary positions are computed in float32, but x is float64; cast it to float32")
    frequencies = _turns(theta, x.shape[-1], scaling)
    place = positions[..., None, None].astype(jnp.uint32)
    fractions = jnp.zeros((), jnp.uint32)
    for digit, frequency in enumerate(frequencies):
        fractions += ((place >> (_DIGIT_BITS * digit)) & (2**_DIGIT_BITS - 1)) * jnp.asarray(frequency)
    factor = attention_factor(scaling)

    def wave(behind: jax.Array) -> jax.Array:
        # Read as a signed integer, a fraction of a turn is an angle between minus half and half a turn.
        angles = (fractions - behind).astype(jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
        return factor * jnp.cos(angles)

    # XLA for CPUs would recompute the waves for every head, which takes longer than everything else here;
    # the result of a loop is computed once.
    behind = jnp.array([0, _QUARTER_TURN], jnp.uint32)
    cos, sin = jax.lax.map(wave, behind) if mesh_platform() == "cpu" else jax.vmap(wave)(behind)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@cache
def _turns(theta: float, head_dim: int, scaling: RotaryScaling | None) -> np.ndarray:
    """uint32 [digits, H / 2]: rotation of each wave per unit of each 8-bit digit, in 2**-32 of a turn."""
    turns = inverse_frequencies(theta, head_dim, scaling) / (2 * math.pi)
    digits = turns * 2.0 ** (_DIGIT_BITS * np.arange(_DIGITS)[:, None])
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
            return dynamic_theta(theta, head_dim, scaling) ** -exponents
        case YarnScaling():
            kept = 1 - _yarn_ramp(theta, head_dim, scaling)
            return plain * kept + plain / scaling.factor * (1 - kept)
        case Llama3Scaling(factor, low, high, original):
            kept = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
            return plain * kept + plain / factor * (1 - kept)


def dynamic_theta(theta: float, head_dim: int, scaling: DynamicScaling) -> float:
    """The base of plain rotary positions that are equal to dynamically scaled ones of base ``theta``."""
    longer = scaling.context / scaling.original_context
    if longer <= 1:
        return theta
    return theta * (scaling.factor * longer - (scaling.factor - 1)) ** (head_dim / (head_dim - 2))


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
