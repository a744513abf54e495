"""How long a training step should take on a machine, from the rates of one of its devices.

The step is this project's: blocks recomputed in the backward, keys and values round a ring, weights
sharded over all devices and gathered layer by layer, AdamW in float32. Its time is a sum of parts:

    products    projections, feedforward, norms: forward, recomputed, backward
    head        logits and loss
    attention   hops of the ring, in step with each other: each waits for the slowest device
    hops        what a hop's transfer takes beyond the compute that hides it
    gathers     weights gathered for forward and backward, gradients scattered, likewise
    optimizer   its passes over memory

A ring of one device is plain blockwise attention. Rates are inputs, measured (``device_rates``) or
published, and say nothing about memory: whether a step fits is another question.
"""

from dataclasses import dataclass, fields, replace

from agentic_ring.errors import ArgumentError
from agentic_ring.models.transformer import TransformerConfig
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

ATTENTION_BACKWARD = 2.5
"""Operations of an attention backward over its forward: five products, one of which repeats the scores."""

GRADIENT_BYTES = 4
"""Of a number of any gradient on its way to other devices: all are summed in float32."""

OPTIMIZER_BYTES = 32
"""A parameter's share of an update's memory traffic, float32: the gradient is read for its norm and
once more, parameter and two moments are read and written."""

ACCUMULATION_BYTES = 12
"""Likewise for adding the gradients of a part of the batch: two reads and a write."""


@dataclass(frozen=True)
class KernelRates:
    """Operations a second of an attention kernel, masked pairs not counted; five products backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """What one device reaches, in operations or bytes a second.

    Attributes:
      products: all of a layer but attention, over the operations of its matrix products.
      head: logits and loss, over the operations of forward and backward: what it computes twice to keep
        few logits counts as slowness.
      causal: attention of a block of tokens to itself.
      full: attention to other tokens, without a mask.
      link: to the next device of the ring, while as much is received.
      collective: what a device receives in a gather, or sends in a scatter.
      memory: reads and writes.
      peak: that a utilisation is a share of.
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
        """The same shares of the peak on a device of another peak, whose links carry all traffic.

        Args:
          peak: operations a second.
          link: bytes a second.
          memory: bytes a second.
        """
        scale = peak / self.peak
        causal, full = (
            KernelRates(rates.forward * scale, rates.backward * scale) for rates in (self.causal, self.full)
        )
        return Rates(self.products * scale, self.head * scale, causal, full, link, link, memory, peak)

    def shared_by(self, devices: int) -> "Rates":
        """What each of several devices has of them, where they are simulated on one processor."""
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


@dataclass(frozen=True)
class Step:
    """One training step on a machine.

    Attributes:
      stack: shape of the model, and whether its blocks are recomputed.
      vocab_size: of its logits.
      context: tokens of a sequence.
      ring: devices that share a sequence; 1 is blockwise attention.
      devices: of the machine; weights are sharded over all of them.
      rows: sequences that a ring computes at once.
      accumulation: parts of a batch that are computed one after the other.
      itemsize: bytes of a number of the compute dtype.

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
                f"context is {self.context}, which does not divide into two halves a device of a ring of "
                f"{self.ring}; choose a multiple of {halves}"
            )

    @property
    def block(self) -> int:
        """Tokens of a sequence on a device."""
        return self.context // self.ring

    @property
    def sequences(self) -> int:
        """Of a whole batch."""
        return self.rows * self.devices // self.ring * self.accumulation

    @property
    def tokens(self) -> int:
        """Of a whole batch."""
        return self.sequences * self.context

    @property
    def flops(self) -> StepFlops:
        """Of a whole batch, on all devices."""
        return step_flops(self.stack, self.vocab_size, self.context, self.sequences)

    def columns(self) -> dict[str, int]:
        """The sizes as named cells, for a CSV file."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stack"}
        return {**numbers, "sequences": self.sequences, "tokens": self.tokens}

    @property
    def parameters(self) -> int:
        """Numbers in matrices: layers, embedding and head."""
        return layer_weights(self.stack) * self.stack.layers + 2 * self.stack.width * self.vocab_size


@dataclass(frozen=True)
class Hiding:
    """What the program hides behind what.

    Attributes:
      hops: transfers of the ring behind attention.
      gathers: of weights, and scatters of gradients, behind a layer's products.
      zigzag: whether the sequence lies in zigzag order, which balances a causal mask; else the last
        device attends to whole blocks in every hop, and the others wait for it.
    """

    hops: bool = True
    gathers: bool = True
    zigzag: bool = True


@dataclass(frozen=True)
class Projection:
    """Seconds of the parts of a step on every device, and what they are a share of."""

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
        """Of the step."""
        return self.products + self.head + self.attention + self.hops + self.gathers + self.optimizer

    def columns(self) -> dict[str, float]:
        """Sizes, seconds and utilisation as named cells, for a CSV file."""
        parts = ("products", "head", "attention", "hops", "gathers", "optimizer")
        cells = {**self.step.columns(), "peak": self.peak, "seconds": self.seconds}
        cells |= {f"{part}_seconds": getattr(self, part) for part in parts}
        counts = vars(self.step.flops)
        return cells | {f"mfu_{name}": self.utilisation(operations) for name, operations in counts.items()}

    def utilisation(self, flops: float) -> float:
        """Share of the peak of all devices, for operations of a whole batch."""
        return flops / (self.seconds * self.step.devices * self.peak)


def project(step: Step, rates: Rates, hiding: Hiding = Hiding()) -> Projection:
    """The time of a step by its parts; see the module."""
    stack, layers, parts = step.stack, step.stack.layers, step.accumulation
    tokens = step.rows * step.block
    attends = 2 if stack.remat in ("full", "offload") else 1
    forward_products = tokens * layer_products(stack) / rates.products
    again = tokens * regrouped_products(stack) / rates.products
    forward = _ring_pass(step, rates.causal.forward, rates.full.forward, rates.link, hiding, backward=False)
    backward = _ring_pass(step, rates.causal.backward, rates.full.backward, rates.link, hiding, backward=True)
    gathers = _gathers(step, rates, forward_products if hiding.gathers else 0.0)
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
    """How often a step computes the forward of a layer, attention apart."""
    return 1 if stack.remat == "none" else 2


def hop_operations(stack: TransformerConfig, block: int, *, backward: bool = False) -> float:
    """Of a hop of a balanced causal ring: half of a block's pairs."""
    return attention_forward(stack, block**2 / 2) * (ATTENTION_BACKWARD if backward else 1)


def hop_bytes(stack: TransformerConfig, block: int, itemsize: int, *, backward: bool = False) -> float:
    """That a hop sends: keys and values, in the backward their gradients as well."""
    numbers = 2 * block * stack.key_value_heads * stack.head_dim
    return numbers * (itemsize + (GRADIENT_BYTES if backward else 0))


@dataclass(frozen=True)
class _Pass:
    """One way round the ring in one layer: seconds of compute, and of transfers that nothing hides."""

    compute: float
    exposed: float


def _ring_pass(
    step: Step, causal_rate: float, full_rate: float, link: float, hiding: Hiding, *, backward: bool
) -> _Pass:
    """Hops as in ``attention.ring.transport``: each transfer is under way while a hop computes."""
    stack, others = step.stack, step.ring - 1
    operations = step.rows * hop_operations(stack, step.block, backward=backward)
    own, other = operations / causal_rate, operations / full_rate
    if not hiding.zigzag:
        other *= 2
    compute = own + others * other
    if not others:
        return _Pass(compute, 0.0)
    block = step.rows * hop_bytes(stack, step.block, step.itemsize) / link
    gradient = block * GRADIENT_BYTES / step.itemsize if backward else 0.0
    # The gradients' last trip home has nothing left to hide behind; it is made in the compute dtype.
    home = block if backward else 0.0
    if not hiding.hops:
        return _Pass(compute, others * (block + gradient) + home)
    # The first block comes while the own one computes; the last hop fetches none, but sends gradients.
    between = (others - 1) * _beyond(block + gradient, other)
    waits = _beyond(block, own) + between + _beyond(gradient, other)
    return _Pass(compute, waits + home)


def _gathers(step: Step, rates: Rates, hidden: float) -> float:
    """Exposed seconds of weights and gradients in one part of a batch.

    Args:
      step: what is computed.
      rates: of a device.
      hidden: seconds of a layer's products forward, behind which a gather hides.
    """
    number = (step.devices - 1) / step.devices / rates.collective
    gather, scatter = number * step.itemsize, number * GRADIENT_BYTES
    layer, ends = layer_weights(step.stack), 2 * step.stack.width * step.vocab_size
    # A recomputed block and its backward share one gather. Embedding and head have no layer to hide
    # behind, and are gathered and scattered once.
    before = _beyond(gather * layer, hidden)
    after = _beyond((gather + scatter) * layer, (forwards(step.stack) - 1 + BACKWARD) * hidden)
    return step.stack.layers * (before + after) + (gather + scatter) * ends


def _beyond(needed: float, hidden: float) -> float:
    return max(0.0, needed - hidden)
