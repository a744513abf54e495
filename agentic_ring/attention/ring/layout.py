"""Orders of a sequence over the ring that give every device the same share of a causal mask.

L tokens, ring of P devices, L / P tokens per device. For L = 8, P = 2:

    contiguous    0 1 2 3 | 4 5 6 7    device 0 has almost no work, device 1 almost all
    striped       0 2 4 6 | 1 3 5 7    token t on device t mod P (arXiv 2311.09431)
    zigzag        0 1 6 7 | 2 3 4 5    halves i and 2P - 1 - i on device i

Zigzag is the balanced order to prefer: after the first hop its chunk pairs are either full or
empty, so that half of them are skipped; striped leaves a diagonal in every pair.

An order is an index array: ``permuted = x[order]`` and ``x = permuted[inverse_order(order)]``.
"""

import math
from typing import overload

import jax
import numpy as np

from agentic_ring.attention.options import LAYOUTS, Layout, Schedule
from agentic_ring.errors import ArgumentError, UnknownNameError


def padded_length(
    length: int, ring: int, layout: Layout, unit: int = 1, *, schedule: Schedule = "unidirectional"
) -> int:
    """The smallest length >= ``length`` that ``layout`` spreads evenly over the ring.

    Args:
      length: tokens of the sequence.
      ring: devices of the ring.
      layout: one of ``LAYOUTS``.
      unit: tokens that must stay together, such as the four of one environment step: every device
        (in zigzag every half of a device) then holds a multiple of them.
      schedule: the schedule of the ring; "bidirectional" cuts each device's block into quarters.
    """
    _check_layout(layout)
    if length < 1 or ring < 1 or unit < 1:
        raise ArgumentError(f"length, ring and unit must be at least 1, got {length}, {ring}, {unit}")
    multiple = unit * length_multiple(ring, layout)
    return round_up(length, math.lcm(multiple, length_multiple(ring, layout, schedule)))


def length_multiple(
    devices: int,
    layout: Layout,
    schedule: Schedule = "unidirectional",
    *,
    ulysses: int = 1,
    permuted: bool = True,
) -> int:
    """The number of which a sequence's length must be a multiple to spread evenly over the devices.

    Args:
      devices: devices that share the sequence.
      layout: the order in which they work on it.
      ulysses: devices that exchange heads for tokens; a ring joins ``devices / ulysses`` such groups.
      permuted: whether the devices hold the sequence in ``layout`` already. If not, they hold consecutive
        blocks and exchange tokens; for striped, each block is then dealt evenly over the ring.
    """
    ring = devices // ulysses
    holders = devices if permuted else ring  # devices over which the layout is laid out
    parts = {"contiguous": 1, "striped": 1 if permuted else ring, "zigzag": 2}[layout] if holders > 1 else 1
    quarters = 4 if schedule == "bidirectional" and ring > 1 else 1
    return math.lcm(devices, holders * parts, ring * quarters)


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is at least ``length``."""
    return -(-length // multiple) * multiple


@overload
def shard_order(layout: Layout, length: int, ring: int, index: int) -> np.ndarray: ...
@overload
def shard_order(layout: Layout, length: int, ring: int, index: jax.Array) -> jax.Array: ...
def shard_order(layout: Layout, length: int, ring: int, index: int | jax.Array) -> np.ndarray | jax.Array:
    """The places in the original sequence of the tokens that device ``index`` holds, int32 [L / P].

    Args:
      length: tokens of the sequence; a multiple of the ring, for zigzag of twice the ring.
      ring: devices of the ring, P.
      index: device in the ring; may be a traced value such as ``jax.lax.axis_index``.

    Raises:
      ArgumentError: the length does not spread evenly; see ``padded_length``.
    """
    _check_length(layout, length, ring)
    block = length // ring
    place = np.arange(block, dtype=np.int32)
    if layout == "contiguous" or ring == 1:
        return index * block + place
    if layout == "striped":
        return place * ring + index
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


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise UnknownNameError("layout", layout, LAYOUTS)


def _check_length(layout: Layout, length: int, ring: int) -> None:
    needed = padded_length(length, ring, layout)
    if needed != length:
        raise ArgumentError(
            f"a sequence of {length} tokens does not spread evenly over a ring of {ring} in {layout} order; "
            f"pad it to {needed} tokens (agentic_ring.attention.padded_length)"
        )
