"""Measured model FLOPs utilisation of training steps on this machine, and the ratio to the expected time.

A step's utilisation is its operations over those that the devices could do at their peak: the published
peak where it is known for the dtype, else the rate of a product of square matrices before each step, the
median of those of the same round. The expected time of a step follows from its operations (the model's own)
at the rate of the blockwise step.

Simulated devices share one processor, so steps are comparable where they do the same work on its cores.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentic_ring.errors import ArgumentError
from agentic_ring.results.timing import Spread, square_product, square_product_flops, time_interleaved
from evals.compile.machines import hardware_of
from evals.utilisation.projection import Rates, Step, reached_rates


class Candidate(NamedTuple):
    """A step to time: its method, its sizes, and a function that compiles it and returns its update."""

    method: str
    step: Step
    make: Callable[[], Callable[[], Any]]


class MeasuredRow(NamedTuple):
    """Measurements of one candidate.

    Attributes:
      method: name of the method.
      step: sizes of the step.
      spreads: seconds per update as ``seconds``; utilisation by each count of ``StepFlops`` as ``mfu_paper``
        and so on; actual over expected seconds as ``over_blockwise_rate``, which blockwise itself lacks.
    """

    method: str
    step: Step
    spreads: dict[str, Spread]

    def columns(self) -> dict[str, Any]:
        """Returns the row as named cells of a CSV file."""
        cells = {"method": self.method, **self.step.columns(), "tokens_a_second": self.tokens_a_second}
        cells |= {f"flops_{count}": number for count, number in self.step.flops._asdict().items()}
        for name, spread in self.spreads.items():
            cells |= spread.cells(name)
        return cells

    @property
    def tokens_a_second(self) -> float:
        """Tokens per second of all devices."""
        return self.step.tokens / self.spreads["seconds"].median


def measure(candidates: Sequence[Candidate], itemsize: int, turns: int) -> tuple[list[MeasuredRow], Rates]:
    """Times the candidates, each after a product of square matrices.

    Args:
      candidates: steps, of which the first is the blockwise one.
      itemsize: bytes per number of the compute dtype, which decides the peak.
      turns: number of timed rounds.

    Returns:
      A row for each candidate, and the rates that a device reached in the blockwise one.

    Raises:
      ArgumentError: fewer than one round.
    """
    if turns < 1:
        raise ArgumentError(f"turns is {turns}; it must be at least 1")
    product = partial(square_product, {2: jnp.bfloat16, 4: jnp.float32}[itemsize])
    times = _times([[product, each.make] for each in candidates], turns)
    peak, _ = known_peak(itemsize)
    peaks = [peak or square_product_flops() / median(products) for products in zip(*times[::2], strict=True)]
    rows = []
    for candidate, seconds in zip(candidates, times[1::2], strict=True):
        row = _row(candidate, seconds, peaks)
        if rows:
            more = candidate.step.flops.model / candidates[0].step.flops.model
            expected = [more * base for base in times[1]]
            row.spreads["over_blockwise_rate"] = Spread.ratio(seconds, expected)
        rows.append(row)
    sharing = candidates[0].step.devices if simulated() else 1
    return rows, reached_rates(candidates[0].step, median(times[1]), median(peaks) / sharing)


def simulated() -> bool:
    """Whether devices share one processor."""
    return jax.default_backend() == "cpu"


def known_peak(itemsize: int) -> tuple[float | None, str]:
    """Returns the peak operations per second of one device, if known, and a description of the peak."""
    hardware = hardware_of(jax.devices()[0].device_kind)
    if hardware is not None and itemsize == 2:
        return hardware.flops, f"{hardware.flops / 1e12:g} TFLOP/s, the peak of {hardware.name} in bfloat16"
    where = "of all cores together" if simulated() else "of one device"
    return None, f"the rate of a matrix product {where}, measured beside each step"


def _times(makers: Sequence[Sequence[Callable[[], Callable[[], Any]]]], turns: int) -> list[list[float]]:
    """Returns the seconds of each function in each round."""
    if simulated():
        # One shared machine: all are interleaved, so that its changes affect all of them.
        return time_interleaved(turns, *(make() for group in makers for make in group))
    # Steadier devices, all of whose memory one step may need.
    return [seconds for group in makers for seconds in time_interleaved(turns, *(make() for make in group))]


def _row(candidate: Candidate, seconds: Sequence[float], peaks: Sequence[float]) -> MeasuredRow:
    """Returns a candidate's row without its ratio; both sequences have one number per round."""
    step, spreads = candidate.step, {"seconds": Spread.of(seconds)}
    devices = 1 if simulated() else step.devices
    for count, operations in step.flops._asdict().items():
        rounds = zip(seconds, peaks, strict=True)
        spreads[f"mfu_{count}"] = Spread.of(operations / (spent * peak * devices) for spent, peak in rounds)
    return MeasuredRow(candidate.method, step, spreads)
