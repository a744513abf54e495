"""Moves a sharded sequence from consecutive blocks into a balanced order, and back.

The moves are a fixed pattern between devices, so that each holds two blocks at most; an index over
the sharded axis would gather the whole sequence on every device.
"""

import jax
import jax.numpy as jnp

from agentic_ring.attention.options import Layout
from agentic_ring.attention.ring.collectives import RingAxis


def to_layout(x: jax.Array, layout: Layout, axis: RingAxis) -> jax.Array:
    """From this device's consecutive block [B, T, ...] to its block in ``layout``.

    For use inside ``jax.shard_map``; T is even for zigzag and a multiple of the ring for striped.
    """
    if layout == "striped":
        return _to_stripes(x, axis)
    if layout == "zigzag":
        evens, odds = _zigzag_routes(axis.size)
        early, late = jnp.split(x, 2, axis=1)  # halves 2i and 2i + 1 of the sequence
        return jnp.concatenate(
            _even_first(axis.permute(early, evens), axis.permute(late, odds), axis), axis=1
        )
    return x


def from_layout(x: jax.Array, layout: Layout, axis: RingAxis) -> jax.Array:
    """The inverse of ``to_layout``."""
    if layout == "striped":
        return _from_stripes(x, axis)
    if layout == "zigzag":
        evens, odds = _zigzag_routes(axis.size)
        early, late = jnp.split(x, 2, axis=1)
        even, odd = _even_first(early, late, axis)
        return jnp.concatenate(
            (axis.permute(even, _inverse(evens)), axis.permute(odd, _inverse(odds))), axis=1
        )
    return x


def _zigzag_routes(ring: int) -> tuple[list[int], list[int]]:
    """Where each device sends its even and its odd half of the sequence; each a permutation.

    Half h starts on device h // 2 and goes to device h, or 2P - 1 - h where h >= P: of the two
    halves that a device ends with, h and 2P - 1 - h, one is even and one is odd.
    """

    def destination(half: int) -> int:
        return min(half, 2 * ring - 1 - half)

    return [destination(2 * i) for i in range(ring)], [destination(2 * i + 1) for i in range(ring)]


def _inverse(destinations: list[int]) -> list[int]:
    return [destinations.index(place) for place in range(len(destinations))]


def _even_first(a: jax.Array, b: jax.Array, axis: RingAxis) -> tuple[jax.Array, jax.Array]:
    """(a, b) on even devices, (b, a) on odd ones, where the earlier half is the odd one. Its own inverse."""
    even_device = axis.index() % 2 == 0
    return jnp.where(even_device, a, b), jnp.where(even_device, b, a)


def _to_stripes(x: jax.Array, axis: RingAxis) -> jax.Array:
    """Token t of the sequence to device t mod P."""
    stripes = x.reshape(x.shape[0], x.shape[1] // axis.size, axis.size, *x.shape[2:])
    return axis.all_to_all(stripes, split_axis=2, concat_axis=1).reshape(x.shape)


def _from_stripes(x: jax.Array, axis: RingAxis) -> jax.Array:
    blocks = x.reshape(x.shape[0], axis.size, x.shape[1] // axis.size, 1, *x.shape[2:])
    return axis.all_to_all(blocks, split_axis=1, concat_axis=3).reshape(x.shape)
