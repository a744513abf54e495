"""The rule by which ``attention`` chooses its strategy, and which strategies can serve a call.

The rule takes the strategy with the least estimated time (``cost_model``) of those that can serve. Three
cases are not estimated:

1. No ring of several devices, or queries and keys of different lengths, which stay whole: "local".
2. A sliding window within a device's block: "ring". Only neighbours exchange anything.
3. Long blocks on CPU devices: "ring". Such devices rehearse the program of larger machines.
"""

from dataclasses import dataclass

from agentic_ring.attention.cost_model import (
    HARDWARE,
    Estimate,
    Shapes,
    estimate,
    heads_divide,
    readable,
    ulysses_degree,
)
from agentic_ring.attention.inputs import STRATEGIES, Strategy
from agentic_ring.attention.mask import MaskSpec

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
    if strategy == "all_gather" and (size := gathered_bytes(shapes)) > GATHER_LIMIT:
        return (
            f"all keys, values and their gradients take {size / 2**30:.1f} GiB per device, "
            f"the limit is {GATHER_LIMIT / 2**30:.1f}"
        )
    if strategy == "ulysses_ring" and shapes.inner == shapes.ring:
        return "needs the sequence over two mesh axes, fast links on the inner one"
    if strategy == "ulysses_ring" and shapes.permuted and platform != "cpu":
        return "joins no blocks of a permuted sequence: masks by positions, which only the XLA kernel serves"
    return None


def gathered_bytes(shapes: Shapes) -> int:
    """Bytes per device of keys, values and their gradients under "all_gather"."""
    numbers = 2 * shapes.batch * shapes.ring * shapes.tokens * shapes.key_heads * shapes.head_dim
    return numbers * (shapes.itemsize + 4)


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
