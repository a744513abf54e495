"""The rule by which ``attention`` chooses its strategy, and which strategies can serve a call.

The rule, for blocks of c tokens, N query and K key heads per device:

1. No ring of several devices, or queries and keys of different lengths, which stay whole: "local".
2. A sliding window: "ring". Only the devices in its reach exchange anything.
3. Long blocks: "ring". A hop computes 4 c^2 N H operations (half with a causal mask) and sends 2 c K H
   numbers, so it hides the transfer where c >= operations per byte of the link * bytes a number
   * K / 2N (twice that, causal); arXiv 2310.01889, section 3.2, with the heads of a group counted.
4. Shorter blocks, where each hop would wait: "ulysses" where the ring divides the heads, which moves
   least; else "all_gather", which waits once, as long as what is gathered stays under a limit; else "ring".
"""

from dataclasses import dataclass
from math import gcd

from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.options import Strategy

OPERATIONS_PER_BYTE = {"cpu": 32, "gpu": 2200, "tpu": 5000}
"""Compute over link bandwidth. NVIDIA H100: 990 TFLOP/s over 450 GB/s of NVLink one way. TPU v5e and v5p:
197 TFLOP/s over 45 GB/s and 459 over 90, one link one way. CPU: simulated devices share one memory."""

GATHER_LIMIT = 2**30
"""Bytes of keys, values and their float32 gradients that "all_gather" may put on a device."""


@dataclass(frozen=True)
class Shapes:
    """The sizes per device on which the choice depends.

    Attributes:
      ring: devices that share a sequence.
      inner: those of them on the innermost of several axes; all of them where there is one axis.
      batch: rows.
      tokens: queries, c.
      heads: query heads, N.
      key_heads: K.
      head_dim: H.
      itemsize: bytes of a number.
    """

    ring: int
    inner: int
    batch: int
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    itemsize: int


@dataclass(frozen=True)
class Choice:
    """A strategy and the reason for it."""

    strategy: Strategy
    reason: str


def choose_strategy(shapes: Shapes, mask: MaskSpec, platform: str) -> Choice:
    """Chooses by the rule of the module."""
    if shapes.ring == 1:
        return Choice("local", "the sequence is whole on every device")
    if mask.window is not None:
        return Choice("ring", "a sliding window: only devices in its reach exchange keys")
    needed = hiding_block(shapes, mask, platform)
    if shapes.tokens >= needed:
        return Choice("ring", f"blocks of {shapes.tokens} tokens hide a transfer, {needed} would do")
    short = f"blocks of {shapes.tokens} tokens hide no transfer, that takes {needed}"
    if refusal(shapes, "ulysses") is None:
        return Choice("ulysses", f"{short}; heads divide over the devices")
    if gathered_bytes(shapes) <= GATHER_LIMIT:
        return Choice("all_gather", f"{short}; all keys and values fit on a device")
    return Choice("ring", f"{short}, but heads do not divide over the devices and all keys fit on none")


def reason_against(shapes: Shapes, mask: MaskSpec, platform: str, strategy: Strategy) -> str:
    """Why the rule does not choose this strategy, where it chooses another."""
    chosen = choose_strategy(shapes, mask, platform)
    if chosen.strategy == "local":
        return chosen.reason
    if (why := refusal(shapes, strategy)) is not None:
        return f"cannot serve: {why}"
    if strategy == "local":
        return f"each of {shapes.ring} devices would do the work of all"
    if strategy == "ulysses_ring":
        return 'never chosen by "auto"; meant for rings over several hosts, fast links on the inner axis'
    if strategy == "ring":
        return f"each of {shapes.ring - 1} hops would wait for its keys"
    if strategy == "all_gather" and (size := gathered_bytes(shapes)) > GATHER_LIMIT:
        return (
            f"all keys, values and their gradients take {size / 2**30:.1f} GiB per device, "
            f"the limit is {GATHER_LIMIT / 2**30:.1f}"
        )
    if chosen.strategy == "ulysses":
        return "ulysses moves less"
    if mask.window is not None:
        return "would send all keys, of which the window needs few"
    return "would wait for everything it sends, which a ring hides"


def hiding_block(shapes: Shapes, mask: MaskSpec, platform: str) -> int:
    """The number of tokens per device from which a hop's compute takes as long as its transfer."""
    intensity = OPERATIONS_PER_BYTE[platform] * shapes.itemsize * shapes.key_heads / (2 * shapes.heads)
    return round(intensity * (2 if mask.causal else 1))


def gathered_bytes(shapes: Shapes) -> int:
    """Bytes per device of keys, values and their gradients under "all_gather"."""
    numbers = 2 * shapes.batch * shapes.ring * shapes.tokens * shapes.key_heads * shapes.head_dim
    return numbers * (shapes.itemsize + 4)


def ulysses_degree(shapes: Shapes, strategy: Strategy) -> int:
    """Devices that exchange heads for tokens.

    All for "ulysses"; for "ulysses_ring" those of the inner axis, or with one axis as many as can.
    """
    if strategy == "ulysses":
        return shapes.ring
    if strategy != "ulysses_ring":
        return 1
    if shapes.inner < shapes.ring:
        return shapes.inner
    return next(
        n for n in range(max(shapes.ring - 1, 1), 0, -1) if shapes.ring % n == 0 and _heads_divide(shapes, n)
    )


def refusal(shapes: Shapes, strategy: Strategy) -> str | None:
    """Why this strategy cannot serve these shapes; None where it can."""
    if strategy not in ("ulysses", "ulysses_ring"):
        return None
    if shapes.ring == 1:
        return "the sequence is whole on every device"
    degree = ulysses_degree(shapes, strategy)
    if degree == 1 or not _heads_divide(shapes, degree):
        return (
            f"{shapes.heads} query and {shapes.key_heads} key heads per device do not divide over "
            f"{degree if degree > 1 else f'any part of {shapes.ring}'} devices"
        )
    return None


def _heads_divide(shapes: Shapes, devices: int) -> bool:
    """Whether heads divide over devices. Key heads may be fewer: several devices then get the same."""
    common = gcd(shapes.key_heads, devices)
    return shapes.heads % devices == 0 and common in (devices, shapes.key_heads)
