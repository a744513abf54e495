"""Tables 2 and 4 on other machines: every number is projected from rates and links, none is measured.

Table 2 gives the minimum block and sequence length whose compute overlaps the whole transfer of a hop. The
compute grows with the square of the block length c and the transfer only linearly, so there is a minimum c.
The paper counts all pairs, 4 d c^2 operations at the peak rate, against 4 c d bytes of keys and values in
bfloat16: c = F / B, and a sequence of 6 blocks per device (arXiv 2310.01889, section 3.2). This project's
hops compute half of the pairs, so they need longer blocks; its backward pass also sends gradients, and
computes more.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.transformer_config import TransformerConfig
from evals.compile.llama_step import Method
from evals.compile.machines import machine
from evals.utilisation.projection import (
    Overlap,
    Projection,
    Rates,
    Step,
    hop_bytes,
    hop_operations,
    project,
)
from experiments import paper

Configs = Callable[[str, Method], LlamaConfig]
"""Function that returns a model's configuration by size and method."""

MACHINE_NAMES = {
    "8x A100": ("8xA100", "A100 NVLink"),
    "32x A100": ("32xA100", "A100 InfiniBand"),
    "TPUv4-1024": ("TPUv4-1024", "TPUv4"),
}
"""Names of Table 4's machines in ``evals.compile.machines``, and of their rows in Table 2."""


class MinimumBlock(NamedTuple):
    """Tokens of a block whose compute takes as long as its transfer: the paper's, and of our causal ring."""

    paper: float
    forward: float
    backward: float


def minimum_block(stack: TransformerConfig, operations_per_second: float, link: float) -> MinimumBlock:
    """Returns the minimum block for bfloat16 keys and values.

    Args:
      stack: shape of the model: query heads are computed, key heads are sent.
      operations_per_second: rate of a device in attention; the peak in the paper.
      link: bytes per second to the next device.
    """

    def balance(*, backward: bool) -> float:
        """Solves c^2 operations / rate = c bytes / link, with both taken at c = 1."""
        work = hop_operations(stack, 1, backward=backward) / operations_per_second
        return hop_bytes(stack, 1, 2, backward=backward) / link / work

    forward, backward = balance(backward=False), balance(backward=True)
    # All pairs are twice those of a causal hop, and the paper has a key head for each query head.
    return MinimumBlock(forward / 2 * stack.heads / stack.key_value_heads, forward, backward)


class ProjectedRow(NamedTuple):
    """Projection of one variant of a training step.

    Attributes:
      machine: name of the machine.
      model: size of the model.
      method: "blockwise" or "ring", and the difference from a ring that overlaps all it can.
      projection: seconds of the step.
      over_blockwise_rate: seconds over those that the rate of the projected blockwise step predicts, in
        the model's own operations.
    """

    machine: str
    model: str
    method: str
    projection: Projection
    over_blockwise_rate: float

    def columns(self) -> dict[str, Any]:
        """Returns the row as named cells of a CSV file."""
        cells = {"projected": True, "machine": self.machine, "model": self.model, "method": self.method}
        return {**cells, **self.projection.columns(), "over_blockwise_rate": self.over_blockwise_rate}


def paper_steps(row: paper.MfuRow, devices: int, configs: Configs) -> tuple[Step, Step]:
    """Returns the blockwise and the ring step of a row of Table 4, in bfloat16.

    A device holds as many tokens at once as the blockwise context has, its limit in Table 3. A batch is
    cut into parts where it has more; where it has fewer sequences than devices, blockwise attention
    still computes one per device, as nothing else would use all devices.
    """
    block = row.blockwise_context
    parts = max(1, row.batch_tokens // (block * devices))
    blockwise = step_of(configs(row.model, "blockwise"), block, 1, devices, parts)
    together = min(row.batch_tokens, devices * block) // row.ring_context
    parts = row.batch_tokens // (together * row.ring_context)
    ring = step_of(configs(row.model, "ring"), row.ring_context, devices // together, devices, parts)
    return blockwise, ring


def step_of(config: LlamaConfig, context: int, ring: int, devices: int, parts: int = 1) -> Step:
    """Returns the sizes of a step in bfloat16."""
    return Step(config.transformer, config.vocab_size, context, ring, devices, accumulation=parts)


def project_variants(
    machine: str, model: str, steps: tuple[Step, Step], rates: Rates, torus_link: float | None
) -> list[ProjectedRow]:
    """Returns the blockwise step, the ring, and the ring with one feature left out at a time.

    Args:
      machine, model: names for the rows.
      steps: blockwise and ring step.
      rates: rates of a device of this machine.
      torus_link: bytes per second of a single link, where ``rates.link`` is of several.
    """
    blockwise, ring = steps
    base = project(blockwise, rates)
    variants = {
        "blockwise": base,
        "ring": project(ring, rates),
        "ring, contiguous order": project(ring, rates, Overlap(zigzag=False)),
        "ring, hops exposed": project(ring, rates, Overlap(hops=False)),
        "ring, gathers exposed": project(ring, rates, Overlap(gathers=False)),
    }
    if torus_link is not None:
        variants["ring, one torus link"] = project(ring, replace(rates, link=torus_link))
    rate = blockwise.flops.model / base.seconds
    return [
        ProjectedRow(machine, model, method, found, found.seconds / (found.step.flops.model / rate))
        for method, found in variants.items()
    ]


def project_paper(configs: Configs, rates: Rates) -> list[ProjectedRow]:
    """All rows of Table 4, at Table 2's peaks and links.

    Args:
      configs: models by size and method.
      rates: measured somewhere; their shares of that device's peak are carried over.
    """
    rows: list[ProjectedRow] = []
    for row in paper.mfu_rows():
        name, interconnect = MACHINE_NAMES[row.hardware]
        target, link = machine(name), paper.interconnects()[interconnect]
        own = rates.of_machine(link.flops, link.link_bandwidth, target.hardware.memory_bandwidth)
        torus = target.hardware.link_bandwidth if target.hardware.platform == "tpu" else None
        rows += project_variants(name, row.model, paper_steps(row, target.devices, configs), own, torus)
    return rows


def project_machine(name: str, model: str, configs: Configs, block: int, rates: Rates) -> list[ProjectedRow]:
    """One sequence a device against one over all devices, at the machine's own peak and link.

    Args:
      name: one of ``evals.compile.machines.MACHINES``.
      model: its size.
      configs: models by size and method.
      block: tokens a device.
      rates: as in ``project_paper``.
    """
    devices, hardware = machine(name).devices, machine(name).hardware
    own = rates.of_machine(hardware.flops, hardware.link_bandwidth, hardware.memory_bandwidth)
    blockwise = step_of(configs(model, "blockwise"), block, 1, devices)
    ring = step_of(configs(model, "ring"), block * devices, devices, devices)
    return project_variants(name, model, (blockwise, ring), own, torus_link=None)
