"""Training steps timed on the devices that are here, and what was to be expected of them.

A step's utilisation is its operations over those that the devices could do at their peak: the maker's
figure where it is known for the dtype, else the rate of a product of square matrices, the median of
those before each step of the same turn. Three expectations stand beside each step, as actual seconds
over expected:

    blockwise rate     operations (the model's own) at the rate of the blockwise step
    blockwise, parts   the blockwise step's seconds, changed as ``projection`` says of the two steps:
                       a longer context has more attention, whose rate differs from that of products
    parts              ``projection`` alone, from the rates of single parts on one device

Simulated devices share one processor, so steps compare where they do the same work on the same cores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from agentic_ring.errors import ArgumentError
from evals.compile.hardware import HARDWARE, Hardware
from evals.speed.interleaved import Spread, time_interleaved
from evals.utilisation.device_rates import Probe, rates, simulated
from evals.utilisation.projection import Hiding, Rates, Step, project

BLOCKWISE = "blockwise"
"""Name of the candidate that the others are compared with."""

_KINDS = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
"""Our names of devices by JAX's, whole: an H100 on another board has another peak."""


@dataclass(frozen=True)
class Candidate:
    """A training step to time.

    Attributes:
      method: its name.
      step: its sizes.
      make: compiles it, makes its arrays and returns the function of one update.
    """

    method: str
    step: Step
    make: Callable[[], Callable[[], Any]]


@dataclass(frozen=True)
class MeasuredRow:
    """One candidate, measured.

    Attributes:
      method: its name.
      step: its sizes.
      seconds: of an update.
      paper: utilisation by the paper's operations, over all turns.
      halved: with causal attention halved.
      model: by this project's own count.
      over_blockwise_rate: actual over expected seconds, see the module; None for blockwise itself.
      over_blockwise_parts: likewise.
      over_parts: likewise.
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
        """The row as one level of named cells, for a CSV file."""
        flops = self.step.flops
        cells: dict[str, Any] = {"method": self.method, **self.step.columns()}
        cells |= {"tokens_a_second": self.tokens_a_second}
        cells |= {f"flops_{count}": operations for count, operations in vars(flops).items()}
        for field, value in vars(self).items():
            if isinstance(value, Spread):
                name = f"mfu_{field}" if field in vars(flops) else field
                cells |= {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
        return cells

    @property
    def tokens_a_second(self) -> float:
        """Of all devices."""
        return self.step.tokens / self.seconds.median


@dataclass(frozen=True)
class Measurement:
    """Rows, and the rates of one device that were measured with them.

    Attributes:
      rows: one a candidate.
      rates: medians.
      peak: what utilisation is a share of.
    """

    rows: list[MeasuredRow]
    rates: Rates
    peak: str


def measure(
    candidates: Sequence[Candidate], probes: Mapping[str, Probe], itemsize: int, turns: int
) -> Measurement:
    """Times the probes and the candidates.

    Args:
      candidates: the first is the blockwise one; without any only rates are measured.
      probes: of ``device_rates.probes``.
      itemsize: bytes of a number of the compute dtype, which decides the peak.
      turns: timed ones.

    Raises:
      ArgumentError: fewer than one turn.
    """
    if turns < 1:
        raise ArgumentError(f"turns is {turns}; it must be at least 1")
    matmul = probes["matmul"]
    # The yardstick before each step as well, as a shared machine changes within a turn. Steps come first:
    # they know whether they fit.
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
    yardsticks = zip(of_probes[list(probes).index("matmul")], *of_steps[::2], strict=True)
    peaks = [peak or matmul.work / Spread.of(seconds).median for seconds in yardsticks]
    for candidate, seconds in zip(candidates, of_steps[1::2], strict=True):
        rows.append(_row(candidate, seconds, peaks, turn_rates, candidates[0].step, of_steps[1]))
    medians = {name: Spread.of(seconds).median for name, seconds in zip(probes, of_probes, strict=True)}
    return Measurement(rows, rates(probes, medians, peak), source)


def known_peak(itemsize: int) -> tuple[float | None, str]:
    """Operations a second of one device in the dtype of this size, and in words where that comes from."""
    hardware = hardware_here()
    if hardware is not None and itemsize == 2:
        return hardware.flops, f"{hardware.flops / 1e12:g} TFLOP/s, the peak of {hardware.name} in bfloat16"
    where = "of all cores together" if simulated() else "of one device"
    return None, f"the rate of a matrix product {where}, measured beside each step"


def hardware_here() -> Hardware | None:
    """What is known about the devices that JAX finds; None for others."""
    name = _KINDS.get(jax.devices()[0].device_kind)
    return None if name is None else HARDWARE[name]


def _times(makers: Sequence[Sequence[Callable[[], Callable[[], Any]]]], turns: int) -> list[list[float]]:
    """Seconds of each function in each turn."""
    if simulated():
        # One shared machine: all take turns, so that its changes meet all of them.
        return time_interleaved(turns, *(make() for group in makers for make in group))
    # Steadier devices, whose memory one step may need whole.
    return [seconds for group in makers for seconds in time_interleaved(turns, *(make() for make in group))]


def _row(
    candidate: Candidate,
    seconds: Sequence[float],
    peaks: Sequence[float],
    turn_rates: Sequence[Rates],
    blockwise: Step,
    blockwise_seconds: Sequence[float],
) -> MeasuredRow:
    """All sequences have one number a turn."""
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
    """Seconds; simulated devices share their processor, so a transfer hides behind nothing."""
    if simulated():
        return project(step, rates.shared_by(step.devices), Hiding(hops=False, gathers=False)).seconds
    return project(step, rates).seconds
