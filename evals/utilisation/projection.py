"""Projected time of a training step on a machine, from the rates of one of its devices.

The step is this project's: layers recomputed in the backward pass, keys and values sent round a ring,
weights sharded over all devices and gathered layer by layer, AdamW in float32. Its time is a sum of parts:

    products    projections, feedforward, norms: forward, recomputed, backward
    head        logits and loss
    attention   compute of the ring's hops; each hop waits for the slowest device
    hops        exposed time of the hops' transfers, beyond the compute that overlaps them
    gathers     exposed time of gathering weights (forward and backward) and scattering gradients
    optimizer   passes over memory

A ring of one device is plain blockwise attention. Rates are inputs, measured (``measured_rates``) or
published (``rates``), and say nothing about memory or about whether a step fits.
"""

from dataclasses import dataclass, fields

from agentic_ring.errors import ArgumentError
from agentic_ring.models.transformer_config import TransformerConfig
from evals.utilisation.flops import (
    BACKWARD,
    StepFlops,
    attention_forward,
    head_products,
    layer_products,
    layer_weights,
    regrouped_products,
    step_flops,
)
from evals.utilisation.rates import Rates

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass over its forward: five products, one of them the scores again."""

GRADIENT_BYTES = 4
"""Bytes per number of a gradient that is sent: all gradients are summed in float32."""

OPTIMIZER_BYTES = 32
"""Memory traffic of an update in bytes per parameter, float32: the gradient is read for its norm and once
more, parameter and two moments are read and written."""

ACCUMULATION_BYTES = 12
"""The same for adding the gradients of one part of the batch: two reads and a write."""


@dataclass(frozen=True)
class Step:
    """Sizes of one training step on a machine.

    Attributes:
      stack: shape of the model, and whether its layers are recomputed.
      vocab_size: size of the vocabulary.
      context: tokens per sequence.
      ring: number of devices that share a sequence; 1 is blockwise attention.
      devices: number of devices of the machine; weights are sharded over all of them.
      rows: sequences that a ring computes at once.
      accumulation: parts of a batch that are computed one after the other.
      itemsize: bytes per number of the compute dtype.

    Raises:
      ArgumentError: the ring does not divide the devices, or the context the ring.
    """

    stack: TransformerConfig
    vocab_size: int
    context: int
    ring: int
    devices: int
    rows: int = 1
    accumulation: int = 1
    itemsize: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if field.name != "stack" and number < 1:
                raise ArgumentError(f"{field.name} is {number}; it must be at least 1")
        if self.devices % self.ring:
            raise ArgumentError(f"a ring of {self.ring} does not divide {self.devices} devices")
        halves = self.ring if self.ring == 1 else 2 * self.ring
        if self.context % halves:
            raise ArgumentError(
                f"context is {self.context}, which does not divide into two halves per device of a ring of "
                f"{self.ring}; choose a multiple of {halves}"
            )

    @property
    def block(self) -> int:
        """Tokens of a sequence on a device."""
        return self.context // self.ring

    @property
    def sequences(self) -> int:
        """Sequences per batch."""
        return self.rows * self.devices // self.ring * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens per batch."""
        return self.sequences * self.context

    @property
    def flops(self) -> StepFlops:
        """Operations per batch, on all devices."""
        return step_flops(self.stack, self.vocab_size, self.context, self.sequences)

    def columns(self) -> dict[str, int]:
        """Returns the sizes as named cells of a CSV file."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stack"}
        return {**numbers, "sequences": self.sequences, "tokens": self.tokens}

    @property
    def parameters(self) -> int:
        """Number of parameters in matrices: layers, embedding and head."""
        return layer_weights(self.stack) * self.stack.layers + 2 * self.stack.width * self.vocab_size


@dataclass(frozen=True)
class Overlap:
    """The overlap of transfers with compute in a program, and its balance.

    Attributes:
      hops: whether attention overlaps the ring's transfers.
      gathers: whether a layer's products overlap gathers of weights and scatters of gradients.
      zigzag: whether the sequence is in zigzag order, which balances a causal mask; otherwise the last
        device attends to whole blocks in every hop, and the others wait for it.
    """

    hops: bool = True
    gathers: bool = True
    zigzag: bool = True


@dataclass(frozen=True)
class Projection:
    """Projected seconds of the parts of a step, and the peak rate of a device."""

    step: Step
    peak: float
    products: float
    head: float
    attention: float
    hops: float
    gathers: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.products + self.head + self.attention + self.hops + self.gathers + self.optimizer

    def columns(self) -> dict[str, float]:
        """Returns sizes, seconds and utilisation as named cells of a CSV file."""
        parts = ("products", "head", "attention", "hops", "gathers", "optimizer")
        cells = {**self.step.columns(), "peak": self.peak, "seconds": self.seconds}
        cells |= {f"{part}_seconds": getattr(self, part) for part in parts}
        counts = vars(self.step.flops)
        return cells | {f"mfu_{name}": self.utilisation(operations) for name, operations in counts.items()}

    def utilisation(self, flops: float) -> float:
        """Returns the share of all devices' peak rate, for the operations of a batch."""
        return flops / (self.seconds * self.step.devices * self.peak)


def project(step: Step, rates: Rates, overlap: Overlap = Overlap()) -> Projection:
    """Projects the time of a step by its parts; see the module."""
    stack, layers, parts = step.stack, step.stack.layers, step.accumulation
    tokens = step.rows * step.block
    attends = 2 if stack.remat in ("full", "offload") else 1
    forward_products = tokens * layer_products(stack) / rates.products
    again = tokens * regrouped_products(stack) / rates.products
    forward = _ring_pass(step, rates.causal_forward, rates.full_forward, rates.link, overlap, backward=False)
    backward = _ring_pass(
        step, rates.causal_backward, rates.full_backward, rates.link, overlap, backward=True
    )
    gathers = _gathers(step, rates, forward_products if overlap.gathers else 0.0)
    passes = OPTIMIZER_BYTES + (parts * ACCUMULATION_BYTES if parts > 1 else 0)
    return Projection(
        step=step,
        peak=rates.peak,
        products=parts * layers * ((forwards(stack) + BACKWARD) * forward_products + again),
        head=parts * (1 + BACKWARD) * tokens * head_products(stack, step.vocab_size) / rates.head,
        attention=parts * layers * (attends * forward.compute + backward.compute),
        hops=parts * layers * (attends * forward.exposed + backward.exposed),
        gathers=parts * gathers,
        optimizer=passes * step.parameters / step.devices / rates.memory,
    )


def forwards(stack: TransformerConfig) -> int:
    """Returns how often a step computes the forward pass of a layer, without its attention."""
    return 1 if stack.remat == "none" else 2


def hop_operations(stack: TransformerConfig, block: int, *, backward: bool = False) -> float:
    """Returns the operations of a hop of a balanced causal ring: half of a block's pairs."""
    return attention_forward(stack, block**2 / 2) * (ATTENTION_BACKWARD if backward else 1)


def hop_bytes(stack: TransformerConfig, block: int, itemsize: int, *, backward: bool = False) -> float:
    """Returns the bytes that a hop sends: keys and values, and in the backward pass their gradients."""
    numbers = 2 * block * stack.key_value_heads * stack.head_dim
    return numbers * (itemsize + (GRADIENT_BYTES if backward else 0))


@dataclass(frozen=True)
class _Pass:
    """One pass round the ring in one layer: seconds of compute, and of exposed transfers."""

    compute: float
    exposed: float


def _ring_pass(
    step: Step, causal_rate: float, full_rate: float, link: float, overlap: Overlap, *, backward: bool
) -> _Pass:
    """Times the hops of ``agentic_ring.attention``: each transfer is in flight while a hop computes."""
    stack, others = step.stack, step.ring - 1
    operations = step.rows * hop_operations(stack, step.block, backward=backward)
    own, other = operations / causal_rate, operations / full_rate
    if not overlap.zigzag:
        other *= 2
    compute = own + others * other
    if not others:
        return _Pass(compute, 0.0)
    block = step.rows * hop_bytes(stack, step.block, step.itemsize) / link
    gradient = block * GRADIENT_BYTES / step.itemsize if backward else 0.0
    # Nothing overlaps the final transfer of dK and dV, which is made in the compute dtype.
    final = block if backward else 0.0
    if not overlap.hops:
        return _Pass(compute, others * (block + gradient) + final)
    # The first block arrives while the own one is computed; the last hop only sends gradients.
    between = (others - 1) * _beyond(block + gradient, other)
    waits = _beyond(block, own) + between + _beyond(gradient, other)
    return _Pass(compute, waits + final)


def _gathers(step: Step, rates: Rates, hidden: float) -> float:
    """Returns the exposed seconds of gathers and scatters in one part of a batch.

    Args:
      step: sizes of the step.
      rates: rates of a device.
      hidden: seconds of a layer's forward products, which overlap a gather.
    """
    number = (step.devices - 1) / step.devices / rates.collective
    gather, scatter = number * step.itemsize, number * GRADIENT_BYTES
    layer, ends = layer_weights(step.stack), 2 * step.stack.width * step.vocab_size
    # A recomputed layer and its backward pass share one gather. No layer overlaps those of embedding and
    # head, which are gathered and scattered once.
    before = _beyond(gather * layer, hidden)
    after = _beyond((gather + scatter) * layer, (forwards(step.stack) - 1 + BACKWARD) * hidden)
    return step.stack.layers * (before + after) + (gather + scatter) * ends


def _beyond(needed: float, hidden: float) -> float:
    return max(0.0, needed - hidden)
