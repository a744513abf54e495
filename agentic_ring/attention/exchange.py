"""Moving a sharded sequence from consecutive blocks to a balanced order and back.

The moves are a fixed pattern between devices, so that each holds two blocks at most; an index over
the sharded axis would gather the whole sequence on every device.
"""

import jax
import jax.numpy as jnp

from agentic_ring.attention.layout import Layout


def to_layout(x: jax.Array, layout: Layout, axis_name: str) -> jax.Array:
    """From this device's consecutive block [B, T, ...] to its block in ``layout``.

    Args:
      x: local array inside ``jax.shard_map``; T is even for zigzag and a multiple of the ring for
        striped.
      layout: order of the result.
      axis_name: mesh axis of the ring.
    """
    if layout == "striped":
        return _to_stripes(x, axis_name)
    if layout == "zigzag":
        evens, odds = _zigzag_routes(jax.lax.axis_size(axis_name))
        early, late = jnp.split(x, 2, axis=1)  # halves 2i and 2i + 1 of the sequence
        even = jax.lax.ppermute(early, axis_name, evens)
        odd = jax.lax.ppermute(late, axis_name, odds)
        return jnp.concatenate(_even_first(even, odd, axis_name), axis=1)
    return x


def from_layout(x: jax.Array, layout: Layout, axis_name: str) -> jax.Array:
    """The inverse of ``to_layout``."""
    if layout == "striped":
        return _from_stripes(x, axis_name)
    if layout == "zigzag":
        evens, odds = _zigzag_routes(jax.lax.axis_size(axis_name))
        early, late = jnp.split(x, 2, axis=1)
        even, odd = _even_first(early, late, axis_name)
        early = jax.lax.ppermute(even, axis_name, [(there, here) for here, there in evens])
        late = jax.lax.ppermute(odd, axis_name, [(there, here) for here, there in odds])
        return jnp.concatenate((early, late), axis=1)
    return x


def _zigzag_routes(ring: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, destination) of the even and of the odd halves of the sequence, each a permutation.

    Half h starts on device h // 2 and goes to device h, or 2P - 1 - h where h >= P: of the two
    halves that a device ends with, h and 2P - 1 - h, one is even and one is odd.
    """

    def destination(half: int) -> int:
        return min(half, 2 * ring - 1 - half)

    evens = [(device, destination(2 * device)) for device in range(ring)]
    odds = [(device, destination(2 * device + 1)) for device in range(ring)]
    return evens, odds


def _even_first(a: jax.Array, b: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """(a, b) on even devices, (b, a) on odd ones, where the earlier half is the odd one. Its own inverse."""
    even_device = jax.lax.axis_index(axis_name) % 2 == 0
    return jnp.where(even_device, a, b), jnp.where(even_device, b, a)


def _to_stripes(x: jax.Array, axis_name: str) -> jax.Array:
    """Token t of the sequence to device t mod P."""
    ring = jax.lax.axis_size(axis_name)
    stripes = x.reshape(x.shape[0], x.shape[1] // ring, ring, *x.shape[2:])
    return jax.lax.all_to_all(stripes, axis_name, 2, 1, tiled=True).reshape(x.shape)


def _from_stripes(x: jax.Array, axis_name: str) -> jax.Array:
    ring = jax.lax.axis_size(axis_name)
    blocks = x.reshape(x.shape[0], ring, x.shape[1] // ring, 1, *x.shape[2:])
    return jax.lax.all_to_all(blocks, axis_name, 1, 3, tiled=True).reshape(x.shape)
