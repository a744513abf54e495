"""Rates that one device reaches in the parts of a training step: their CSV form, and published ones."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agentic_ring.errors import DataError
from evals.common.rows import read_rows
from evals.compile.hardware import HARDWARE


@dataclass(frozen=True)
class KernelRates:
    """Operations per second of an attention kernel, without masked pairs; five products backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """Rates that one device reaches, in operations or bytes per second.

    Attributes:
      products: a layer without its attention, over the operations of its matrix products.
      head: logits and loss, over the operations of forward and backward. Logits that are computed twice,
        to keep few of them, lower this rate.
      causal: attention of a block of tokens to itself.
      full: attention to other tokens, without a mask.
      link: transfer to the next device of the ring, while as much is received.
      collective: bytes that a device receives in a gather, or sends in a scatter.
      memory: reads and writes.
      peak: rate of which the utilisation is a share.
    """

    products: float
    head: float
    causal: KernelRates
    full: KernelRates
    link: float
    collective: float
    memory: float
    peak: float

    def of_machine(self, peak: float, link: float, memory: float) -> "Rates":
        """Returns the same shares of the peak for a device of another peak, whose links carry all traffic.

        Args:
          peak: operations per second.
          link: bytes per second of a link.
          memory: bytes per second of the memory.
        """
        scale = peak / self.peak
        causal, full = (
            KernelRates(rates.forward * scale, rates.backward * scale) for rates in (self.causal, self.full)
        )
        return Rates(self.products * scale, self.head * scale, causal, full, link, link, memory, peak)

    def shared_by(self, devices: int) -> "Rates":
        """Returns the rates of each of several devices that are simulated on one processor."""
        causal, full = (
            KernelRates(rates.forward / devices, rates.backward / devices)
            for rates in (self.causal, self.full)
        )
        return replace(
            self,
            products=self.products / devices,
            head=self.head / devices,
            causal=causal,
            full=full,
            memory=self.memory / devices,
            peak=self.peak / devices,
        )


def rate_columns(rates: Rates) -> dict[str, float]:
    """Returns the rates as named cells of one row of a CSV file."""
    cells = asdict(rates)
    for kernel in ("causal", "full"):
        cells |= {f"{kernel}_{name}": rate for name, rate in cells.pop(kernel).items()}
    return cells


def read_rates(path: Path) -> Rates:
    """Reads the first row of a CSV file with ``rate_columns``.

    Raises:
      DataError: no such file, or one that holds something else.
    """
    cells = read_rows(path)[0]
    try:
        causal, full = (
            KernelRates(float(cells[f"{name}_forward"]), float(cells[f"{name}_backward"]))
            for name in ("causal", "full")
        )
        names = ("products", "head", "link", "collective", "memory", "peak")
        return Rates(causal=causal, full=full, **{name: float(cells[name]) for name in names})
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} holds no rates ({error}); give a rates.csv of table4_mfu.py") from error


_H100 = HARDWARE["h100"]

# Products: 780 TFLOP/s, https://gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405, a matrix
# product by itself; norms and rotations are not included, so this is an upper bound. Attention, 16384
# tokens, 16 heads of 128: the records of openxla/tokamax in data/autotuning/nvidia_h100_80gb_hbm3, cuDNN
# forward (645 causal, 694 full) and Mosaic backward (452, 455).
PUBLISHED = Rates(
    products=780e12,
    head=780e12,
    causal=KernelRates(645e12, 452e12),
    full=KernelRates(694e12, 455e12),
    link=_H100.link_bandwidth,
    collective=_H100.link_bandwidth,
    memory=_H100.memory_bandwidth,
    peak=_H100.flops,
)
"""Published rates of an H100 SXM in bfloat16, for projections where no accelerator can be measured."""
