"""Rates that one device reaches in the parts of a training step: their CSV form, and published ones."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from agentic_ring.errors import DataError
from agentic_ring.results.rows import read_rows
from evals.compile.hardware import HARDWARE

COMPUTING = ("products", "head", "causal_forward", "causal_backward", "full_forward", "full_backward")
"""Fields of ``Rates`` that are operations per second."""


@dataclass(frozen=True)
class Rates:
    """Rates that one device reaches, in operations or bytes per second.

    Attributes:
      products: a layer without its attention, over the operations of its matrix products.
      head: logits and loss, over the operations of forward and backward. Logits that are computed twice,
        to keep few of them, lower this rate.
      link: transfer to the next device of the ring, while as much is received.
      collective: bytes that a device receives in a gather, or sends in a scatter.
      memory: reads and writes.
      peak: rate of which the utilisation is a share.
      causal_forward, causal_backward: attention kernel of a block of tokens to itself, without masked pairs;
        five products backward.
      full_forward, full_backward: the same for attention to other tokens, without a mask.
    """

    products: float
    head: float
    link: float
    collective: float
    memory: float
    peak: float
    causal_forward: float
    causal_backward: float
    full_forward: float
    full_backward: float

    def of_machine(self, peak: float, link: float, memory: float) -> "Rates":
        """Returns the same shares of the peak for a device of another peak, whose links carry all traffic.

        Args:
          peak: operations per second.
          link: bytes per second of a link.
          memory: bytes per second of the memory.
        """
        scale = peak / self.peak
        computing = {name: getattr(self, name) * scale for name in COMPUTING}
        return Rates(link=link, collective=link, memory=memory, peak=peak, **computing)

    def shared_by(self, devices: int) -> "Rates":
        """Returns the rates of each of several devices that are simulated on one processor."""
        shared = {name: getattr(self, name) / devices for name in (*COMPUTING, "memory", "peak")}
        return replace(self, **shared)


def read_rates(path: Path) -> Rates:
    """Reads the first row of a CSV file with the fields of ``Rates``.

    Raises:
      DataError: no such file, or one that holds something else.
    """
    cells = read_rows(path)[0]
    try:
        rates = {field.name: float(cells[field.name]) for field in fields(Rates)}
        if not all(rate > 0 for rate in rates.values()):  # a collective that takes no time is infinitely fast
            raise ValueError("a rate is not a positive number")
        return Rates(**rates)
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
    causal_forward=645e12,
    causal_backward=452e12,
    full_forward=694e12,
    full_backward=455e12,
    link=_H100.link_bandwidth,
    collective=_H100.link_bandwidth,
    memory=_H100.memory_bandwidth,
    peak=_H100.flops,
)
"""Published rates of an H100 SXM in bfloat16, for projections where no accelerator can be measured."""
