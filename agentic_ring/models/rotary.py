"""Rotary positions (arXiv 2104.09864), exact far beyond a million tokens, and the ways to stretch them.

An angle is position x frequency, and only its place within a turn counts. The product in float32 is off by
up to 0.05 at position 524,288. Here turns are counted in whole numbers instead: a frequency is a 32-bit
fraction of a turn, products wrap around as turns do, and positions are taken 8 bits at a time, so that no
frequency's rounding is multiplied by more than 255. What is left is below a millionth at any position
under 16 million.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.platform import mesh_platform
from agentic_ring.errors import ConfigError

_PIECE_BITS = 8
_PIECES = 4
_QUARTER_TURN = 2**30


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (arXiv 2306.15595)."""

    factor: float
    rope_type: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with the sequence ("dynamic NTK").

    Frequencies follow from ``context`` alone and not from the tokens seen so far: else what is cached
    of a document would depend on how it was cut up.
    """

    factor: float
    original_context: int
    """Tokens that the model was trained on."""
    context: int
    """Tokens that it is to be used on."""
    rope_type: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class YarnScaling:
    """Long waves are stretched, short ones kept, and scores sharpened (arXiv 2309.00071)."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    """Turns within ``original_context`` from which a wave is kept."""
    beta_slow: float = 1.0
    """Turns below which it is stretched by ``factor``."""
    attention_factor: float | None = None
    """What rotated queries and keys are multiplied by; None is 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Whether the bounds between kept and stretched are rounded outwards to whole waves."""
    rope_type: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class Llama3Scaling:
    """Waves longer than the original context stretched, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    rope_type: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor {self.high_freq_factor} of llama3 rotary scaling must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )


RotaryScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


def rotary(
    x: jax.Array, positions: jax.Array, theta: float, scaling: RotaryScaling | None = None
) -> jax.Array:
    """Rotates the two halves of each head by position.

    Args:
      x: [B, T, N, H], H even.
      positions: int32 [B, T] or [1, T].
      theta: the longest wavelength is 2 pi theta tokens, unless stretched.
      scaling: how to stretch.

    Returns:
      [B, T, N, H] in x's dtype.
    """
    frequencies = _turns(theta, x.shape[-1], scaling)
    place = positions[..., None, None].astype(jnp.uint32)
    fractions = jnp.zeros((), jnp.uint32)
    for piece, frequency in enumerate(frequencies):
        fractions += ((place >> (_PIECE_BITS * piece)) & (2**_PIECE_BITS - 1)) * jnp.asarray(frequency)
    factor = attention_factor(scaling)

    def wave(behind: jax.Array) -> jax.Array:
        # As a signed number a fraction of a turn is an angle between minus half a turn and half a turn.
        angles = (fractions - behind).astype(jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
        return factor * jnp.cos(angles)

    # On a CPU XLA would work out the waves anew for every head, which takes longer than all else that is
    # done here; what a loop leaves is worked out once.
    behind = jnp.array([0, _QUARTER_TURN], jnp.uint32)
    cos, sin = jax.lax.map(wave, behind) if mesh_platform() == "cpu" else jax.vmap(wave)(behind)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@cache
def _turns(theta: float, head_dim: int, scaling: RotaryScaling | None) -> np.ndarray:
    """uint32 [pieces, H / 2]: what each piece of a position turns a wave by, in 2**-32 of a turn."""
    turns = inverse_frequencies(theta, head_dim, scaling) / (2 * math.pi)
    pieces = turns * 2.0 ** (_PIECE_BITS * np.arange(_PIECES)[:, None])
    return np.round(np.mod(pieces, 1.0) * 2.0**32).astype(np.uint64).astype(np.uint32)


def attention_factor(scaling: RotaryScaling | None) -> float:
    """What rotated queries and keys are multiplied by."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def inverse_frequencies(theta: float, head_dim: int, scaling: RotaryScaling | None) -> np.ndarray:
    """Radians a token of each wave, the fastest first: float64 [H / 2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = theta**-exponents
    match scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case DynamicScaling(factor, original, context):
            longer = factor * max(context, original) / original - (factor - 1)
            return (theta * longer ** (head_dim / (head_dim - 2))) ** -exponents
        case YarnScaling():
            kept = 1 - _yarn_ramp(theta, head_dim, scaling)
            return plain * kept + plain / scaling.factor * (1 - kept)
        case Llama3Scaling(factor, low, high, original):
            kept = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
            return plain * kept + plain / factor * (1 - kept)


def _yarn_ramp(theta: float, head_dim: int, scaling: YarnScaling) -> np.ndarray:
    """How much of each wave is stretched, 0 to 1: float64 [H / 2]."""

    def wave_with(turns: float) -> float:
        """Index of the wave that makes so many turns in the original context."""
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = wave_with(scaling.beta_fast), wave_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steepness = max(high - low, 1e-3)
    return np.clip((np.arange(head_dim // 2) - low) / steepness, 0.0, 1.0)
