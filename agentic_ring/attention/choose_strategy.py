"""The rule by which ``attention`` chooses its strategy: the least estimated time of those that can serve.

Three cases are not estimated:

1. No ring of several devices, or queries and keys of different lengths, which stay whole: "local".
2. A sliding window within a device's block: "ring". Only neighbours exchange anything.
3. Long blocks on CPU devices: "ring". Such devices rehearse the program of larger machines.

A device holds c tokens with N query and K key heads of size H, in a ring of P devices. The estimate of one
call, forward and backward, adds up

compute      4 c (P c) N H operations, half of them with a causal mask and fewer with a window, at the rate
             of the kernel; times 1 + half_tile / t where a call of the kernel sees t tokens of keys, because
             each call reads the queries and merges its output. t is c in a ring, and in an all-gather, which
             computes block by block too; it is the whole sequence after Ulysses. The layout is taken to
             balance the mask.
transfers    the time that compute does not hide. A hop of a ring hides its transfers behind its compute
             (arXiv 2310.01889), except the last gradients. Ulysses and all-gather hide nothing.
latency      of each transfer.

The kernel is the fastest of the platform: on the XLA kernel of a GPU compute takes 17 times as long or more.
"""

import math
from dataclasses import dataclass

from agentic_ring.attention.inputs import STRATEGIES, Strategy
from agentic_ring.attention.mask import MaskSpec


@dataclass(frozen=True)
class Hardware:
    """What an estimate needs to know of a device and its links; rates are in bytes per second."""

    name: str
    flops: float
    """Operations per second of the forward kernel in a call with endless keys."""
    half_tile: int
    """Tokens of keys in a call with which the kernel reaches half that rate."""
    link: float
    """To the next device of a ring."""
    collective: float
    """Of a device in an all-to-all or all-gather."""
    latency: float
    """Seconds to start a transfer and to wait for its end."""
    host: int = 2**31
    """Devices that share fast links, where the mesh does not say it by an inner axis of the ring."""
    network: float = math.inf
    """From a device to other hosts."""


HARDWARE = {
    # cuDNN: 645 TFLOP/s, causal, 16K tokens (tokamax, data/autotuning/nvidia_h100_80gb_hbm3). NVLink has 450
    # GB/s one way, of which NCCL reaches 350 (NVIDIA/nccl#1506). A small call of NCCL takes 12 us
    # (deepseek-ai/DeepEP#303), the rest is a launch. A host has 8 GPUs, each with a network card of 400 Gb/s,
    # at the same share of its rate. half_tile fits ring-flash-attention's README.
    "gpu": Hardware("H100", 690e12, 1200, 350e9, 350e9, 20e-6, host=8, network=39e9),
    # 459 TFLOP/s, 90 GB/s per link one way (jax-ml.github.io/scaling-book/tpus). The kernel's share of the
    # peak, half_tile and the three links of a collective fit maxtext#4687 and #4893. The latency is a guess,
    # on which none of the published cells depends.
    "tpu": Hardware("TPU v5p", 260e12, 1300, 90e9, 270e9, 5e-6),
    # One of 8 simulated devices on 2 cores: fits the table of docs/attention-performance.md within a third.
    "cpu": Hardware("simulated CPU", 24e9, 300, 1e9, 1e9, 0.5e-3),
}
"""Constants by platform, which tests/attention/test_choose_strategy.py compares with published times."""


@dataclass(frozen=True)
class Pass:
    """One pass over all keys."""

    compute: float
    """Its compute time over that of the forward."""
    gradient_bytes: int
    """Bytes per number of the gradients of keys and values that it moves; 0 for none."""


FORWARD = Pass(1.0, 0)
BACKWARD = Pass(3.0, 4)
"""2.5 times the operations at a lower rate: 2.8 to 3.6 times the time on A100, H800 and H100 (README of
ring-flash-attention, tokamax). Gradients travel in float32."""


@dataclass(frozen=True)
class Shapes:
    """The sizes per device on which the choice depends."""

    ring: int
    """Devices that share a sequence."""
    inner: int
    """Those of them on the innermost of several axes; all of them where there is one axis."""
    batch: int
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    itemsize: int
    permuted: bool = False
    """Whether devices hold the sequence in zigzag or striped order, and no positions are given."""


@dataclass(frozen=True)
class Estimate:
    """Seconds that a device spends in one call of attention; see the module."""

    compute: float
    transfers: float
    latency: float

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.compute + self.transfers + self.latency

    def __str__(self) -> str:
        parts = (f"{name} {readable(getattr(self, name))}" for name in ("compute", "transfers", "latency"))
        return f"{readable(self.total)}: {', '.join(parts)}"


def estimate(
    shapes: Shapes,
    mask: MaskSpec,
    hardware: Hardware,
    strategy: Strategy,
    passes: tuple[Pass, ...] = (FORWARD, BACKWARD),
) -> Estimate:
    """Estimates a call under a strategy that spreads it over a ring of several devices; see the module.

    Segments and a prefix are not known here. A rematerialised block runs the forward pass twice.
    """
    ring, degree = shapes.ring, ulysses_degree(shapes, strategy)
    hops, copies = ring // degree, max(1, degree // shapes.key_heads)
    host = shapes.inner if shapes.inner < ring else hardware.host
    # A double ring goes round the inner devices while a block travels between the outer ones.
    inner = shapes.inner if strategy == "ring" and shapes.inner < ring else 1
    outer, outer_link = hops // inner, hardware.network if ring > host else hardware.link
    numbers = shapes.batch * shapes.tokens * shapes.head_dim  # per head
    keys = ring * shapes.tokens
    reach = 1.0 if mask.window is None else min(1.0, mask.window / keys)
    live = reach * (2 - reach) / (2 if mask.causal else 1)
    operations = 4 * numbers * shapes.heads * keys * live
    forward = operations / hardware.flops * (1 + hardware.half_tile / (degree * shapes.tokens))
    block = 2 * numbers * shapes.key_heads * copies
    exchanged = 2 * numbers * (shapes.heads + shapes.key_heads * copies) * shapes.itemsize / degree
    local = min(degree, host) - 1
    compute = transfers = waits = 0.0
    for each in passes:
        compute += each.compute * forward
        moved = block * (shapes.itemsize + each.gradient_bytes)
        if strategy == "all_gather":
            transfers += (ring - 1) * moved / hardware.collective
            waits += 2 if each.gradient_bytes else 1
        elif hops > 1:
            hop = each.compute * forward / hops
            transfers += outer * (inner - 1) * max(0.0, moved / hardware.link - hop)
            transfers += (outer - 1) * max(0.0, moved / outer_link - inner * hop)
            transfers += block * each.gradient_bytes / outer_link
            waits += hops if each.gradient_bytes else hops - 1
        if degree > 1:
            transfers += exchanged * local / hardware.collective
            transfers += exchanged * (degree - 1 - local) / hardware.network
            waits += 2
    return Estimate(compute, transfers, waits * hardware.latency)


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
        n for n in range(max(shapes.ring - 1, 1), 0, -1) if shapes.ring % n == 0 and heads_divide(shapes, n)
    )


def heads_divide(shapes: Shapes, devices: int) -> bool:
    """Whether heads divide over devices. Key heads may be fewer: several devices then get the same."""
    common = math.gcd(shapes.key_heads, devices)
    return shapes.heads % devices == 0 and common in (devices, shapes.key_heads)


def readable(seconds: float) -> str:
    """Seconds as text of three digits, such as "12.3 ms"."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


GATHER_LIMIT = 2**30
"""Bytes of keys, values and their float32 gradients that "all_gather" may put on a device."""

CPU_RING_BLOCK = 128
"""Tokens per CPU device from which the strategy is "ring"."""


@dataclass(frozen=True)
class Choice:
    """A strategy and the reason for it."""

    strategy: Strategy
    reason: str


def choose_strategy(shapes: Shapes, mask: MaskSpec, platform: str) -> Choice:
    """Chooses by the rule of the module."""
    if shapes.ring == 1:
        return Choice("local", "the sequence is whole on every device")
    if _near(shapes, mask):
        return Choice("ring", "a sliding window within a block: only neighbours exchange keys")
    if platform == "cpu" and shapes.tokens >= CPU_RING_BLOCK:
        return Choice("ring", f"CPU devices keep blocks of {CPU_RING_BLOCK} tokens or more in a ring")
    times: dict[Strategy, float] = {
        strategy: time.total
        for strategy, time in estimates(shapes, mask, platform).items()
        if objection(shapes, platform, strategy) is None
    }
    first, *others = sorted(times, key=times.__getitem__)
    following = f"{others[0]} {readable(times[others[0]])}" if others else "no other can serve"
    return Choice(first, f"estimated {readable(times[first])} on {HARDWARE[platform].name}, {following}")


def estimates(shapes: Shapes, mask: MaskSpec, platform: str) -> dict[Strategy, Estimate]:
    """The estimated time by strategy, of those that can serve; empty where the rule does not estimate."""
    if shapes.ring == 1 or _near(shapes, mask):
        return {}
    return {
        strategy: estimate(shapes, mask, HARDWARE[platform], strategy)
        for strategy in STRATEGIES
        if strategy != "local" and refusal(shapes, strategy) is None
    }


def reason_against(shapes: Shapes, mask: MaskSpec, platform: str, strategy: Strategy) -> str:
    """Why the rule does not choose this strategy, where it chooses another."""
    chosen = choose_strategy(shapes, mask, platform)
    if chosen.strategy == "local":
        return chosen.reason
    if (why := objection(shapes, platform, strategy)) is not None:
        return why
    if _near(shapes, mask):
        return "would send all keys, of which the window needs few"
    times = estimates(shapes, mask, platform)
    ratio = times[strategy].total / times[chosen.strategy].total
    return f"estimated {readable(times[strategy].total)}, {ratio:.2f} times {chosen.strategy}"


def objection(shapes: Shapes, platform: str, strategy: Strategy) -> str | None:
    """Why the rule leaves this strategy out in a ring of several devices; None where it does not."""
    if strategy == "local":
        return f"each of {shapes.ring} devices would do the work of all"
    if (why := refusal(shapes, strategy)) is not None:
        return f"cannot serve: {why}"
    numbers = 2 * shapes.batch * shapes.ring * shapes.tokens * shapes.key_heads * shapes.head_dim
    if strategy == "all_gather" and (size := numbers * (shapes.itemsize + 4)) > GATHER_LIMIT:
        return (
            f"all keys, values and their gradients take {size / 2**30:.1f} GiB per device, "
            f"the limit is {GATHER_LIMIT / 2**30:.1f}"
        )
    if strategy == "ulysses_ring" and shapes.inner == shapes.ring:
        return "needs the sequence over two mesh axes, fast links on the inner one"
    if strategy == "ulysses_ring" and shapes.permuted and platform != "cpu":
        return "joins no blocks of a permuted sequence: masks by positions, which only the XLA kernel serves"
    return None


def refusal(shapes: Shapes, strategy: Strategy) -> str | None:
    """Why this strategy cannot serve these shapes; None where it can."""
    if strategy not in ("ulysses", "ulysses_ring"):
        return None
    if shapes.ring == 1:
        return "the sequence is whole on every device"
    degree = ulysses_degree(shapes, strategy)
    if degree == 1 or not heads_divide(shapes, degree):
        return (
            f"{shapes.heads} query and {shapes.key_heads} key heads per device do not divide over "
            f"{degree if degree > 1 else f'any part of {shapes.ring}'} devices"
        )
    return None


def _near(shapes: Shapes, mask: MaskSpec) -> bool:
    """Whether a window reaches no further than the neighbouring devices."""
    return mask.window is not None and mask.window <= shapes.tokens
