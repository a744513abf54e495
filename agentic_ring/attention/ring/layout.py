"""Orders of a sequence over the ring that give every device the same share of the work.

L tokens, ring of P devices, L / P tokens per device. For L = 8, P = 2:

    contiguous       0 1 2 3 | 4 5 6 7    causal: device 0 has almost no work, device 1 almost all
    striped          0 2 4 6 | 1 3 5 7    token t on device t mod P (arXiv 2311.09431)
    block_striped    0 1 4 5 | 2 3 6 7    the same with stripes of up to ``MAX_STRIPE`` tokens
    zigzag           0 1 6 7 | 2 3 4 5    halves i and 2P - 1 - i on device i

For one causal sequence zigzag is the order to prefer: after the first hop its chunk pairs are either full
or empty, so that half of them are skipped. Where documents are packed, or tokens see a prefix or a
window, zigzag leaves some devices with long documents and others with short ones; stripes spread every
document over all devices. Stripes of one token leave something to do in every chunk pair of every hop;
whole blocks leave most pairs empty, to be skipped.

An order is an index array: ``permuted = x[order]`` and ``x = permuted[inverse_order(order)]``. A sequence
that is sharded already is moved by ``to_layout`` and ``from_layout``, a fixed pattern between devices, so
that each holds two blocks at most; an index over the sharded axis would gather the whole sequence on all.
"""

import functools
import math
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.inputs import LAYOUTS, Layout, Schedule
from agentic_ring.attention.kernels.xla import default_chunk
from agentic_ring.attention.mask import Bounds, HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.errors import ArgumentError, UnknownNameError

MAX_STRIPE = 512
"""Longest stripe of "block_striped": a chunk of the kernels."""
MIN_STRIPE = 128
"""Shorter chunks cost a kernel more than a better balance gains."""
STRIPES = 8
"""Stripes per device, times the devices of the ring, that are enough for balance: a short document lies on
few devices of a long ring, so that what a device has in a hop is left to chance, and evens out over many."""


def padded_length(
    length: int,
    ring: int,
    layout: Layout,
    unit: int = 1,
    *,
    schedule: Schedule = "unidirectional",
    ulysses: int = 1,
    permuted: bool = True,
) -> int:
    """The smallest length >= ``length`` that ``layout`` spreads evenly over the ring.

    Args:
      length: tokens of the sequence, which ``ring`` devices share.
      unit: tokens that must stay together, such as the four of one environment step: every device
        (in zigzag every half of a device, in block_striped every stripe) then holds a multiple of them.
      schedule: the schedule of the ring; "bidirectional" cuts each device's block into quarters.
      ulysses: devices that exchange heads for tokens; a ring joins ``ring / ulysses`` such groups.
      permuted: whether the devices hold the sequence in ``layout`` already. If not, they hold consecutive
        blocks, and the groups exchange tokens.
    """
    if layout not in LAYOUTS:
        raise UnknownNameError("layout", layout, LAYOUTS)
    if length < 1 or ring < 1 or unit < 1:
        raise ArgumentError(f"length, ring and unit must be at least 1, got {length}, {ring}, {unit}")
    groups = ring // ulysses
    holders = ring if permuted else groups  # over which the layout is laid out
    parts = 2 if layout == "zigzag" and holders > 1 else 1
    quarters = 4 if schedule == "bidirectional" and groups > 1 else 1
    multiple = math.lcm(ring * unit, holders * parts * unit, groups * quarters)
    padded = -(-length // multiple) * multiple
    if layout == "block_striped" and holders > 1:
        # Padding may lengthen a block so far that it has more stripes.
        while padded % (needed := math.lcm(multiple, holders * unit * _stripes(padded // holders, holders))):
            padded = -(-padded // needed) * needed
    return padded


def stripe_length(layout: Layout, block: int, ring: int) -> int:
    """Consecutive tokens in a stripe, of the ``block`` tokens that a device holds in a striped layout."""
    return 1 if layout == "striped" else block // _stripes(block, ring)


def chunk_run(layout: Layout, block: int, ring: int) -> int | None:
    """Tokens that a kernel had better keep in chunks of their own: a stripe, unless it is short."""
    if layout != "block_striped" or ring == 1:
        return None
    stripe = stripe_length(layout, block, ring)
    return stripe if stripe >= MIN_STRIPE else None


def _stripes(block: int, ring: int) -> int:
    """Stripes of a device's block in "block_striped" order; where it can, at least one for every device."""
    return max(min(ring, block), min(STRIPES * ring, block // MIN_STRIPE), -(-block // MAX_STRIPE))


@overload
def shard_order(layout: Layout, length: int, ring: int, index: int) -> np.ndarray: ...
@overload
def shard_order(layout: Layout, length: int, ring: int, index: jax.Array) -> jax.Array: ...
def shard_order(layout: Layout, length: int, ring: int, index: int | jax.Array) -> np.ndarray | jax.Array:
    """The places in the original sequence of the tokens that device ``index`` holds, int32 [L / P].

    Args:
      length: tokens of the sequence, as ``padded_length`` gives it.
      index: device in the ring; may be a traced value such as ``jax.lax.axis_index``.

    Raises:
      ArgumentError: the length does not spread evenly; see ``padded_length``.
    """
    if (needed := padded_length(length, ring, layout)) != length:
        raise ArgumentError(
            f"a sequence of {length} tokens does not spread evenly over a ring of {ring} in {layout} order; "
            f"pad it to {needed} tokens (agentic_ring.attention.padded_length)"
        )
    block = length // ring
    place = np.arange(block, dtype=np.int32)
    if layout == "contiguous" or ring == 1:
        return index * block + place
    if layout in ("striped", "block_striped"):
        stripe = stripe_length(layout, block, ring)
        return (place // stripe * ring + index) * stripe + place % stripe
    half = block // 2
    late = place // half
    return ((1 - late) * index + late * (2 * ring - 1 - index)) * half + place % half


def order(layout: Layout, length: int, ring: int) -> np.ndarray:
    """The whole permutation, int32 [L]: the shards of devices 0, 1, ... one after another."""
    return np.concatenate([shard_order(layout, length, ring, index) for index in range(ring)])


def inverse_order(permutation: np.ndarray) -> np.ndarray:
    """The order that undoes ``permutation``."""
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation), dtype=permutation.dtype)
    return inverse


def to_layout(x: jax.Array, layout: Layout, axis: RingAxis) -> jax.Array:
    """From this device's consecutive block [B, T, ...] to its block in ``layout``.

    For use inside ``jax.shard_map``; T times the ring is a ``padded_length``.
    """
    if layout in ("striped", "block_striped"):
        return _restripe(x, axis, stripe_length(layout, x.shape[1], axis.size), False)
    if layout == "zigzag":
        evens, odds = _zigzag_routes(axis.size)
        early, late = jnp.split(x, 2, axis=1)  # halves 2i and 2i + 1 of the sequence
        moved = _even_first(axis.permute(early, evens), axis.permute(late, odds), axis)
        return jnp.concatenate(moved, axis=1)
    return x


def from_layout(x: jax.Array, layout: Layout, axis: RingAxis) -> jax.Array:
    """The inverse of ``to_layout``."""
    if layout in ("striped", "block_striped"):
        return _restripe(x, axis, stripe_length(layout, x.shape[1], axis.size), True)
    if layout == "zigzag":
        evens, odds = (inverse_order(np.array(route)).tolist() for route in _zigzag_routes(axis.size))
        early, late = jnp.split(x, 2, axis=1)
        even, odd = _even_first(early, late, axis)
        return jnp.concatenate((axis.permute(even, evens), axis.permute(odd, odds)), axis=1)
    return x


def _zigzag_routes(ring: int) -> tuple[list[int], list[int]]:
    """Where each device sends its even and its odd half of the sequence; each a permutation.

    Half h starts on device h // 2 and goes to device h, or 2P - 1 - h where h >= P: of the two
    halves that a device ends with, h and 2P - 1 - h, one is even and one is odd.
    """
    destinations = [min(half, 2 * ring - 1 - half) for half in range(2 * ring)]
    return destinations[::2], destinations[1::2]


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


# A permutation's transpose is its inverse.
_restripe.defvjp(
    lambda x, axis, stripe, back: (_restripe(x, axis, stripe, back), None),
    lambda axis, stripe, back, _, d_x: (_restripe(d_x, axis, stripe, not back),),
)


def balanced_layout(mask: MaskSpec, labels: bool, ring: int, block: int, platform: str) -> Layout:
    """The layout that gives the devices of a ring, each with ``block`` tokens, the most even work.

    ``labels`` says whether tokens have segment ids, or keys are hidden from ranges of rows.
    """
    if mask.window is not None and not mask.prefix:
        reach = -(-(mask.window - 1) // block) * (1 if mask.causal else 2)
        if reach < ring - 1:
            return "contiguous"  # a device exchanges with few others, and all have nearly the same work
    uneven = labels or mask.window is not None or (mask.causal and mask.prefix > 0)
    if uneven and platform != "tpu":  # whose fast kernel takes no tokens with positions of their own
        return "block_striped"
    plain_causal = mask.causal and mask.window is None and not mask.prefix
    return "zigzag" if plain_causal else "contiguous"


def tile_counts(
    layout: Layout,
    ring: int,
    length: int,
    mask: MaskSpec,
    segment_ids: np.ndarray | None = None,
    hidden_from: np.ndarray | None = None,
) -> np.ndarray:
    """Tiles that each device computes in each hop, int [hops, devices], for one head and all rows.

    A tile is a chunk of queries by one of keys that the mask does not leave empty. A hop lasts as long as its
    slowest device.

    Args:
      length: tokens of the sequence; padded as ``padded_length`` says.
      segment_ids: int [B, length], negative for padding; None is one segment.
      hidden_from: int [B, length], the first place of a row from which on a token is not seen; None where
        all that follow may see it.
    """
    padded = padded_length(length, ring, layout)
    segments = np.zeros((1, length), np.int32) if segment_ids is None else segment_ids
    end = jnp.full((1, length), length)
    hidden = end if hidden_from is None else jnp.asarray(hidden_from, jnp.int32), end
    labels = TokenLabels(jnp.arange(length)[None], jnp.asarray(segments, jnp.int32), (hidden,))
    labels = labels.pad(padded - length)
    block = padded // ring
    run = chunk_run(layout, block, ring)
    chunk = default_chunk(run or block, halves=run is None)

    def bounds(device: int) -> Bounds:
        places = shard_order(layout, padded, ring, device)
        mine = jax.tree.map(lambda x: x[:, places], labels).pad(-block % chunk)
        return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, chunk), mine).bounds()

    shards = [bounds(device) for device in range(ring)]

    def tiles(device: int, hop: int) -> int:
        query = jax.tree.map(lambda x: x[:, :, None], shards[device])
        key = jax.tree.map(lambda x: x[:, None], shards[(device - hop) % ring])
        return int(HopMask(mask, labels, labels).reachable(query, key).sum())

    return np.array([[tiles(device, hop) for device in range(ring)] for hop in range(ring)])


def imbalance(tiles: np.ndarray) -> float:
    """The critical path over the ideal, from tiles [hops, devices]; 1 is a perfect balance.

    The critical path is the sum over hops of the largest number, the ideal that of the mean.
    """
    return float(tiles.max(axis=1).sum() / tiles.mean(axis=1).sum())
