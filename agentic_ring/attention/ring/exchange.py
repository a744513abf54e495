"""Moves a sharded sequence from consecutive blocks into a balanced order, and back.

The moves are a fixed pattern between devices, so that each holds two blocks at most; an index over
the sharded axis would gather the whole sequence on every device.
"""

import functools

import jax
import jax.numpy as jnp

from agentic_ring.attention.options import Layout
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.layout import stripe_length


def to_layout(x: jax.Array, layout: Layout, axis: RingAxis) -> jax.Array:
    """From this device's consecutive block [B, T, ...] to its block in ``layout``.

    For use inside ``jax.shard_map``; T times the ring is a ``padded_length``.
    """
    if layout in ("striped", "block_striped"):
        return _restripe(x, axis, stripe_length(layout, x.shape[1], axis.size), False)
    if layout == "zigzag":
        evens, odds = _zigzag_routes(axis.size)
        early, late = jnp.split(x, 2, axis=1)  # halves 2i and 2i + 1 of the sequence
        return jnp.concatenate(
            _even_first(axis.permute(early, evens), axis.permute(late, odds), axis), axis=1
        )
    return x


def from_layout(x: jax.Array, layout: Layout, axis: RingAxis) -> jax.Array:
    """The inverse of ``to_layout``."""
    if layout in ("striped", "block_striped"):
        return _restripe(x, axis, stripe_length(layout, x.shape[1], axis.size), True)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _restripe(x: jax.Array, axis: RingAxis, stripe: int, back: bool) -> jax.Array:
    """Stripe number s of the sequence to device s mod P, or back to its consecutive block.

    A device holds m stripes of ``stripe`` tokens. Those that one device sends to another are every P-th of
    its own, at most ceil(m / P); an all-to-all of so many has room for them.
    """
    size, here = axis.size, axis.index()
    stripes = x.shape[1] // stripe
    room = -(-stripes // size)
    # Numbers in the whole sequence of the stripes that this device holds in either order.
    block, striped = here * stripes + jnp.arange(stripes), here + jnp.arange(stripes) * size
    other, place = jnp.divmod(jnp.arange(size * room), room)
    # Its stripes to or from each other device, by that device and the room there; some are beyond the end.
    of_block = (other - here * stripes) % size + place * size
    of_striped = (other * stripes + (here - other * stripes) % size - here) // size + place
    sent, taken = of_block, striped // stripes * room + striped % stripes // size
    if back:
        sent, taken = of_striped, block % size * room + block % stripes // size
    parts = x.reshape(x.shape[0], stripes, stripe, *x.shape[2:])
    parts = axis.all_to_all(jnp.take(parts, sent, axis=1, mode="clip"), split_axis=1, concat_axis=1)
    return jnp.take(parts, taken, axis=1).reshape(x.shape)


def _restripe_forward(x: jax.Array, axis: RingAxis, stripe: int, back: bool) -> tuple[jax.Array, None]:
    return _restripe(x, axis, stripe, back), None


def _restripe_backward(axis: RingAxis, stripe: int, back: bool, _: None, d_x: jax.Array) -> tuple[jax.Array]:
    # A permutation's transpose is its inverse.
    return (_restripe(d_x, axis, stripe, not back),)


_restripe.defvjp(_restripe_forward, _restripe_backward)
