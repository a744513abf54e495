"""Interleaved timing of several functions, and the matrix product that their rates are compared with.

The speed of a shared machine changes while it is measured. Functions that run one after the other in
every round meet the same changes. The ratio of two functions is therefore taken within each round, and
the median of these ratios is more reliable than the ratio of two medians.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

MATMUL = {"cpu": 2048}
"""Rows and columns of the reference product's matrices, by platform; 8192 elsewhere."""


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum over several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Summarises at least one value."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def ratio(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Spread":
        """Summarises the ratios of the same round."""
        return cls.of(x / y for x, y in zip(numerators, denominators, strict=True))

    def cells(self, name: str) -> dict[str, float]:
        """The cells of a CSV file's row: ``name`` is the median, with _low and _high the others."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}


def time_interleaved(
    rounds: int, *functions: Callable[[], Any], calls: int = 1, warm_up: int = 1
) -> list[list[float]]:
    """Returns the seconds of one call of each function in each timed round.

    Args:
      functions: functions to time; each returns arrays, which are waited for.
      calls: calls of a function per round, queued one behind the other: more than one where starting a
        call takes a considerable part of its time, as on a GPU.
      warm_up: rounds before the timed ones; 0 for functions that have been called before.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(warm_up + rounds):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(calls - 1):
                function()
            jax.block_until_ready(function())
            times.append((time.perf_counter() - start) / calls)
    return [times[warm_up:] for times in seconds]


def _matmul_size() -> int:
    return MATMUL.get(jax.default_backend(), 8192)


def square_product(dtype: Any) -> Callable[[], Any]:
    """Returns a function that computes the reference product on one device."""
    square = jnp.ones((_matmul_size(), _matmul_size()), dtype, device=jax.devices()[0])
    return partial(jax.jit(jnp.matmul), square, square)


def square_product_flops() -> float:
    """Returns the operations of the reference product."""
    return 2 * _matmul_size() ** 3
