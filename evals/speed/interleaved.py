"""Times of functions that take turns, so that what slows one of them down slows them all.

The speed of a shared machine changes while it is measured. Functions that follow one another, turn
after turn, meet the same changes; a ratio of two is therefore taken within each turn, and the median
of these ratios says more than the ratio of two medians.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Spread:
    """What several turns gave: their median, least and greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of at least one value."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))


def take_turns(
    turns: int, *functions: Callable[[], Any], calls: int = 1, untimed: int = 1
) -> list[list[float]]:
    """Seconds of one call of each function in each turn, after turns that are not timed.

    Args:
      turns: timed ones.
      functions: each returns arrays, which are waited for.
      calls: how often a function is called in its turn, one call queued behind the other: more than
        one where the time to start a call counts beside the time that it takes, as on a GPU.
      untimed: turns before those; 0 for functions that have been called before.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(untimed + turns):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(calls - 1):
                function()
            jax.block_until_ready(function())
            times.append((time.perf_counter() - start) / calls)
    return [times[untimed:] for times in seconds]
