"""Storage formats of a cache: float32, bfloat16, or int8 with one scale per token and head.

                bytes per number  largest error of a number
    float32     4                 0
    bfloat16    2                 2**-8 of the number itself
    int8        1 + 4 / H         1 / 254 of the largest of its token and head

Attention of standard normal queries to 4096 such keys and values of 64 numbers (measured against
float64, relative root mean square): float32 4e-7, bfloat16 2.5e-3, int8 9e-3; with queries four times as
large, so that few keys take most of the weight, 5e-7, 5e-3 and 1.8e-2.

bfloat16 is kept as its bits in uint16. XLA's CPU compiler has no bfloat16 slices: it would widen a
whole cache to float32 to take a piece of it, at every step (measured at 537 MB: 1.08 GB of temporaries
and 460 ms, against 8 MB and 40 ms from the bits).
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from agentic_ring.errors import ArgumentError, UnknownNameError

CacheDtype = Literal["float32", "bfloat16", "int8"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)

_LARGEST_INT8 = 127


@partial(jax.tree_util.register_dataclass, data_fields=["numbers", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Stored:
    """Keys or values as a cache keeps them.

    Attributes:
      numbers: [..., S, H], float32, uint16 (the bits of bfloat16) or int8.
      scales: float32 [..., S], by which int8 numbers are to be multiplied; None for the others.
    """

    numbers: jax.Array
    scales: jax.Array | None = None

    def widened(self) -> jax.Array:
        """The numbers in float32, not multiplied by the scales."""
        if self.numbers.dtype == jnp.uint16:
            bits = self.numbers.astype(jnp.uint32) << 16
            return jax.lax.bitcast_convert_type(bits, jnp.float32)
        return self.numbers.astype(jnp.float32)

    def narrowed(self) -> jax.Array:
        """The numbers of bfloat16 or int8 in bfloat16, not multiplied by the scales; exact."""
        if self.numbers.dtype == jnp.uint16:
            return jax.lax.bitcast_convert_type(self.numbers, jnp.bfloat16)
        return self.numbers.astype(jnp.bfloat16)

    def restored(self) -> jax.Array:
        """The keys or values themselves, float32; for a piece of a cache, not for all of it."""
        numbers = self.widened()
        return numbers if self.scales is None else numbers * self.scales[..., None]


def empty(shape: tuple[int, ...], dtype: CacheDtype) -> Stored:
    """Zeros, [..., S, H].

    Raises:
      UnknownNameError: a dtype that no cache can have.
    """
    if dtype not in CACHE_DTYPES:
        raise UnknownNameError("cache dtype", str(dtype), CACHE_DTYPES)
    scales = jnp.zeros(shape[:-1], jnp.float32) if dtype == "int8" else None
    kept_as = {"float32": jnp.float32, "bfloat16": jnp.uint16, "int8": jnp.int8}[dtype]
    return Stored(jnp.zeros(shape, kept_as), scales)


def store_like(x: jax.Array, like: Stored) -> Stored:
    """``x`` [..., H] in the form of ``like``.

    Raises:
      ArgumentError: ``x`` is float64, which no cache keeps.
    """
    if x.dtype == jnp.float64:
        raise ArgumentError("keys and values are float64, which a cache would round; cast them to float32")
    if like.numbers.dtype == jnp.uint16:
        return Stored(jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16))
    x = x.astype(jnp.float32)
    if like.scales is None:
        return Stored(x)
    scales = jnp.abs(x).max(axis=-1) / _LARGEST_INT8
    # A token of zeros, or one so small that its scale vanishes, is stored as zeros.
    divisor = jnp.where(scales == 0.0, 1.0, scales)
    return Stored(jnp.round(x / divisor[..., None]).astype(jnp.int8), scales)
