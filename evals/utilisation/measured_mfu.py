"""Measured model FLOPs utilisation of training steps on this machine, and the ratio to expected times.

A step's utilisation is its operations over those that the devices could do at their peak: the published
peak where it is known for the dtype, else the rate of a product of square matrices, the median of those
before each step of the same round. Each step has three ratios of actual to expected seconds:

    blockwise rate     operations (the model's own) at the rate of the blockwise step
    blockwise, parts   the blockwise step's seconds, scaled by the projected ratio of the two steps:
                       a longer context has more attention, whose rate differs from that of products
    parts              the projection from the rates of single parts on one device

Simulated devices share one processor, so steps are comparable where they do the same work on its cores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from agentic_ring.errors import ArgumentError
from agentic_ring.results.timing import Spread, time_interleaved
from evals.compile.hardware import hardware_of
from evals.utilisation.measured_rates import Probe, rates, simulated
from evals.utilisation.projection import Overlap, Step, project
from evals.utilisation.rates import Rates

BLOCKWISE = "blockwise"
"""Name of the candidate that all others are compared with."""


@dataclass(frozen=True)
class Candidate:
    """A training step to time.

    Attributes:
      method: name of the method.
      step: sizes of the step.
      make: compiles it, makes its arrays and returns a function that runs one update.
    """

    method: str
    step: Step
    make: Callable[[], Callable[[], Any]]


@dataclass(frozen=True)
class MeasuredRow:
    """Measurements of one candidate.

    Attributes:
      method: name of the method.
      step: sizes of the step.
      seconds: seconds per update.
      paper: utilisation by the paper's count of operations.
      halved: utilisation with causal attention halved.
      model: utilisation by this project's own count.
      over_blockwise_rate, over_blockwise_parts, over_parts: actual over expected seconds, see the module;
        the first two are None for blockwise itself.
    """

    method: str
    step: Step
    seconds: Spread
    paper: Spread
    halved: Spread
    model: Spread
    over_blockwise_rate: Spread | None
    over_blockwise_parts: Spread | None
    over_parts: Spread

    def columns(self) -> dict[str, Any]:
        """Returns the row as named cells of a CSV file."""
        flops = self.step.flops
        cells: dict[str, Any] = {"method": self.method, **self.step.columns()}
        cells |= {"tokens_a_second": self.tokens_a_second}
        cells |= {f"flops_{count}": operations for count, operations in vars(flops).items()}
        for field, value in vars(self).items():
            if isinstance(value, Spread):
                name = f"mfu_{field}" if field in vars(flops) else field
                cells |= value.cells(name)
        return cells

    @property
    def tokens_a_second(self) -> float:
        """Tokens per second of all devices."""
        return self.step.tokens / self.seconds.median


@dataclass(frozen=True)
class Measurement:
    """Rows, and the rates of one device that were measured with them.

    Attributes:
      rows: one row per candidate.
      rates: medians over the rounds.
      peak: description of the rate of which utilisation is a share.
    """

    rows: list[MeasuredRow]
    rates: Rates
    peak: str


def measure(
    candidates: Sequence[Candidate], probes: Mapping[str, Probe], itemsize: int, turns: int
) -> Measurement:
    """Times the probes and the candidates.

    Args:
      candidates: steps, of which the first is the blockwise one; without any only rates are measured.
      probes: result of ``measured_rates.probes``.
      itemsize: bytes per number of the compute dtype, which decides the peak.
      turns: number of timed rounds.

    Raises:
      ArgumentError: fewer than one round.
    """
    if turns < 1:
        raise ArgumentError(f"turns is {turns}; it must be at least 1")
    matmul = probes["matmul"]
    # The matrix product before each step as well, as the load of a shared machine changes within a round.
    # Steps come first: they know whether they fit.
    makers = [[matmul.make, candidate.make] for candidate in candidates]
    makers += [[probe.make] for probe in probes.values()]
    times = _times(makers, turns)
    of_steps, of_probes = times[: 2 * len(candidates)], times[2 * len(candidates) :]
    peak, source = known_peak(itemsize)
    turn_rates = [
        rates(probes, dict(zip(probes, seconds, strict=True)), peak)
        for seconds in zip(*of_probes, strict=True)
    ]
    rows: list[MeasuredRow] = []
    products = zip(of_probes[list(probes).index("matmul")], *of_steps[::2], strict=True)
    peaks = [peak or matmul.work / Spread.of(seconds).median for seconds in products]
    for candidate, seconds in zip(candidates, of_steps[1::2], strict=True):
        rows.append(_row(candidate, seconds, peaks, turn_rates, candidates[0].step, of_steps[1]))
    medians = {name: Spread.of(seconds).median for name, seconds in zip(probes, of_probes, strict=True)}
    return Measurement(rows, rates(probes, medians, peak), source)


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


def _row(
    candidate: Candidate,
    seconds: Sequence[float],
    peaks: Sequence[float],
    turn_rates: Sequence[Rates],
    blockwise: Step,
    blockwise_seconds: Sequence[float],
) -> MeasuredRow:
    """Summarises one candidate; all sequences have one number per round."""
    step, flops = candidate.step, candidate.step.flops
    devices = 1 if simulated() else step.devices
    projected = [_projected(step, each) for each in turn_rates]
    by_parts = [
        own * _projected(step, each) / _projected(blockwise, each)
        for own, each in zip(blockwise_seconds, turn_rates, strict=True)
    ]
    by_rate = [own * flops.model / blockwise.flops.model for own in blockwise_seconds]

    def utilisation(operations: float) -> Spread:
        return Spread.of(
            operations / (spent * peak * devices) for spent, peak in zip(seconds, peaks, strict=True)
        )

    def over(expected: Sequence[float]) -> Spread:
        return Spread.of(spent / other for spent, other in zip(seconds, expected, strict=True))

    itself = candidate.method == BLOCKWISE
    return MeasuredRow(
        method=candidate.method,
        step=step,
        seconds=Spread.of(seconds),
        paper=utilisation(flops.paper),
        halved=utilisation(flops.halved),
        model=utilisation(flops.model),
        over_blockwise_rate=None if itself else over(by_rate),
        over_blockwise_parts=None if itself else over(by_parts),
        over_parts=over(projected),
    )


def _projected(step: Step, rates: Rates) -> float:
    """Projects the seconds; simulated devices share their processor, so nothing overlaps a transfer."""
    if simulated():
        return project(step, rates.shared_by(step.devices), Overlap(hops=False, gathers=False)).seconds
    return project(step, rates).seconds
