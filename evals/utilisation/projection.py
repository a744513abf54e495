"""Projected time of a training step on a machine, from the rates of one of its devices.

The step is this project's: layers recomputed in the backward pass, keys and values sent round a ring,
weights sharded over all devices and gathered layer by layer, AdamW in float32. Its time is a sum of parts:

    products    projections, feedforward, norms: forward, recomputed, backward
    head        logits and loss
    attention   compute of the ring's hops; each hop waits for the slowest device
    hops        exposed time of the hops' transfers, beyond the compute that overlaps them
    gathers     exposed time of gathering weights (forward and backward) and scattering gradients
    optimizer   passes over memory

A ring of one device is plain blockwise attention. Rates are measured or published ones.

FLOPs are counted in three ways, all without what rematerialisation computes again:

    paper    3 (24 s h^2 + 4 s^2 h) layers per sequence; arXiv 2310.01889, section 5.3 and figure 5.
             Four projections of width h, a feedforward of width 4h, scores of all pairs of tokens.
    halved   the same with half of the pairs, which is what a causal mask needs.
    model    gated feedforward at its own width, grouped keys, half of the pairs, logits of the vocabulary.
"""

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path

import jax.numpy as jnp

from agentic_ring.errors import DataError
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.rows import read_rows
from evals.compile.llama_step import LlamaStep, layer_weights
from evals.compile.machines import HARDWARE

BACKWARD = 2
"""Operations of a backward pass over those of its forward pass."""
ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass over its forward: five products, one of them the scores again."""
GRADIENT_BYTES = 4  # per number that is sent: gradients are summed in float32
OPTIMIZER_BYTES = 32
"""Memory traffic of an update in bytes per parameter, float32: the gradient is read for its norm and once
more, parameter and two moments are read and written."""
ACCUMULATION_BYTES = 12  # likewise, for adding the gradients of one part of a batch: two reads and a write

_COMPUTING = ("products", "head", "causal_forward", "causal_backward", "full_forward", "full_backward")
"""Fields of ``Rates`` that are operations per second."""


@dataclass(frozen=True)
class Rates:
    """Rates that one device reaches, in operations or bytes per second.

    Attributes:
      products: a layer without its attention, over the operations of its matrix products.
      head: logits and loss, forward and backward; lower where logits are computed twice to keep few of them.
      link: transfer to the next device of the ring, while as much is received.
      collective: bytes that a device receives in a gather, or sends in a scatter.
      memory: reads and writes.
      peak: rate of which the utilisation is a share.
      causal_forward, causal_backward: attention of a block of tokens to itself, without masked pairs.
      full_forward, full_backward: attention to other tokens, without a mask.
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
        """Returns the same shares of the peak for a device of another peak, whose links carry all traffic."""
        computing = {name: getattr(self, name) * peak / self.peak for name in _COMPUTING}
        return Rates(link=link, collective=link, memory=memory, peak=peak, **computing)


def read_rates(path: Path) -> Rates:
    """Reads the first row of a CSV file with the fields of ``Rates``; a DataError if it holds none."""
    cells = read_rows(path)[0]
    try:
        rates = Rates(**{field.name: float(cells[field.name]) for field in fields(Rates)})
        if not all(rate > 0 for rate in vars(rates).values()):  # inf is a collective that takes no time
            raise ValueError("a rate is not a positive number")
        return rates
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} holds no rates ({error}); give a rates.csv of table4_mfu.py") from error


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
    link=HARDWARE["h100"].link_bandwidth,
    collective=HARDWARE["h100"].link_bandwidth,
    memory=HARDWARE["h100"].memory_bandwidth,
    peak=HARDWARE["h100"].flops,
)
"""Published rates of an H100 SXM in bfloat16, for projections where no accelerator can be measured."""


@dataclass(frozen=True)
class Step:
    """Sizes of one training step on a machine, over all of whose devices the weights are sharded.

    Attributes:
      stack: shape of the model, and whether its layers are recomputed.
      ring: number of devices that share a sequence of ``context`` tokens; 1 is blockwise attention.
      rows: sequences that a ring computes at once.
      accumulation: parts of a batch that are computed one after the other.
      itemsize: bytes per number of the compute dtype.
    """

    stack: TransformerConfig
    vocab_size: int
    context: int
    ring: int
    devices: int
    rows: int = 1
    accumulation: int = 1
    itemsize: int = 2

    @classmethod
    def of(cls, step: LlamaStep) -> "Step":
        """Returns the sizes of a LLaMA's step on its devices, which may be absent."""
        config, devices = step.config, len(step.devices)
        ring, itemsize = devices if step.method == "ring" else 1, jnp.dtype(step.precision).itemsize
        return cls(config.transformer, config.vocab_size, step.context, ring, devices, itemsize=itemsize)

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
    def flops(self) -> dict[str, float]:
        """Operations per batch on all devices by the counts "paper", "halved" and "model"; see the module."""
        stack, context, factor = self.stack, self.context, (1 + BACKWARD) * self.sequences
        dense = 24 * context * stack.width**2 * stack.layers
        pairs = 4 * context**2 * stack.width * stack.layers
        layer = 2 * context * layer_weights(stack) + attention_forward(stack, context**2 / 2)
        model = stack.layers * layer + 2 * context * stack.width * self.vocab_size
        counts = {"paper": dense + pairs, "halved": dense + pairs / 2, "model": model}
        return {name: factor * count for name, count in counts.items()}

    def columns(self) -> dict[str, int]:
        """Returns the sizes as named cells of a CSV file."""
        numbers = {name: value for name, value in vars(self).items() if name != "stack"}
        return {**numbers, "sequences": self.sequences, "tokens": self.tokens}


def attention_forward(stack: TransformerConfig, pairs: float) -> float:
    """Returns the operations of both products over ``pairs`` of query and key in one layer, all heads."""
    return 4 * pairs * stack.heads * stack.head_dim


def hop_operations(stack: TransformerConfig, block: int, *, backward: bool = False) -> float:
    """Returns the operations of a hop of a balanced causal ring: half of a block's pairs."""
    return attention_forward(stack, block**2 / 2) * (ATTENTION_BACKWARD if backward else 1)


def hop_bytes(stack: TransformerConfig, block: int, itemsize: int, *, backward: bool = False) -> float:
    """Returns the bytes that a hop sends: keys and values, and in the backward pass their gradients."""
    numbers = 2 * block * stack.key_value_heads * stack.head_dim
    return numbers * (itemsize + (GRADIENT_BYTES if backward else 0))


def project(
    step: Step, rates: Rates, overlap_hops: bool = True, overlap_gathers: bool = True, zigzag: bool = True
) -> dict[str, float]:
    """Projects the seconds of a step by its parts; see the module.

    Attention overlaps the ring's transfers, and a layer's products the gathers of weights and scatters of
    gradients. Zigzag order balances a causal mask; without it the last device attends to whole blocks in
    every hop, and the others wait for it.
    """
    stack, parts, tokens = step.stack, step.accumulation, step.rows * step.block
    weights, ends = layer_weights(stack), 2 * stack.width * step.vocab_size  # of embedding and head
    layers, forwards = parts * stack.layers, 1 if stack.remat == "none" else 2
    attends = 2 if stack.remat in ("full", "offload") else 1
    forward_products = 2 * tokens * weights / rates.products
    # Each group of heads projects its queries, keys and values once more for their derivative.
    heads = stack.heads + 2 * stack.key_value_heads if stack.head_groups > 1 else 0
    again = 2 * tokens * stack.width * heads * stack.head_dim / rates.products
    forward, forward_hops = _ring_pass(step, rates, overlap_hops, zigzag, backward=False)
    backward, backward_hops = _ring_pass(step, rates, overlap_hops, zigzag, backward=True)
    # A recomputed layer and its backward pass share one gather. No layer overlaps those of embedding and
    # head, which are gathered and scattered once.
    number = (step.devices - 1) / step.devices / rates.collective
    gather, scatter = number * step.itemsize, number * GRADIENT_BYTES
    hidden = forward_products if overlap_gathers else 0.0
    before = max(0.0, gather * weights - hidden)
    after = max(0.0, (gather + scatter) * weights - (forwards - 1 + BACKWARD) * hidden)
    passes = OPTIMIZER_BYTES + (parts * ACCUMULATION_BYTES if parts > 1 else 0)
    return {
        "products": layers * ((forwards + BACKWARD) * forward_products + again),
        "head": parts * (1 + BACKWARD) * tokens * ends / rates.head,
        "attention": layers * (attends * forward + backward),
        "hops": layers * (attends * forward_hops + backward_hops),
        "gathers": parts * (stack.layers * (before + after) + (gather + scatter) * ends),
        "optimizer": passes * (weights * stack.layers + ends) / step.devices / rates.memory,
    }


def reached_rates(step: Step, seconds: float, peak: float) -> Rates:
    """Returns the rate that each device reached in a blockwise step of these seconds, in all computing.

    Its time for gathers and the optimiser counts as computing. ``peak`` is as in ``Rates``.
    """
    links = {"link": inf, "collective": inf, "memory": inf}
    operations = sum(project(step, Rates(**dict.fromkeys(_COMPUTING, 1.0), peak=1.0, **links)).values())
    return Rates(**dict.fromkeys(_COMPUTING, operations / seconds), peak=peak, **links)


def _ring_pass(
    step: Step, rates: Rates, overlap_hops: bool, zigzag: bool, *, backward: bool
) -> tuple[float, float]:
    """Returns the seconds of compute, and of exposed transfers, of one pass round the ring in one layer."""
    way, others = "backward" if backward else "forward", step.ring - 1
    operations = step.rows * hop_operations(step.stack, step.block, backward=backward)
    own = operations / getattr(rates, f"causal_{way}")
    other = operations / getattr(rates, f"full_{way}") * (1 if zigzag else 2)
    compute = own + others * other
    if not others:
        return compute, 0.0
    block = step.rows * hop_bytes(step.stack, step.block, step.itemsize) / rates.link
    gradient = block * GRADIENT_BYTES / step.itemsize if backward else 0.0
    # Nothing overlaps the final transfer of dK and dV, which is made in the compute dtype.
    final = block if backward else 0.0
    if not overlap_hops:
        return compute, others * (block + gradient) + final
    # The first block arrives while the own one is computed; the last hop only sends gradients.
    between = (others - 1) * max(0.0, block + gradient - other)
    return compute, max(0.0, block - own) + between + max(0.0, gradient - other) + final
