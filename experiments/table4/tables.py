"""Tables 2 and 4: measured steps of this machine, and projected ones of others, from rates and links.

Table 2 gives the minimum block and sequence length whose compute overlaps the whole transfer of a hop. The
compute grows with the square of the block length c and the transfer only linearly, so there is a minimum c.
The paper counts all pairs, 4 d c^2 operations at the peak rate, against 4 c d bytes of keys and values in
bfloat16: c = F / B, and a sequence of 6 blocks per device (arXiv 2310.01889, section 3.2). This project's
hops compute half of the pairs, so they need longer blocks; its backward pass also sends gradients, and
computes more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import thousands
from evals.compile.llama_step import SHAPES, LlamaStep, Remat
from evals.compile.machines import machine
from evals.utilisation.kernel_times import KernelTime
from evals.utilisation.projection import Rates, Step, hop_bytes, hop_operations, project
from experiments import paper

MACHINE_NAMES = {
    "8x A100": ("8xA100", "A100 NVLink"),
    "32x A100": ("32xA100", "A100 InfiniBand"),
    "TPUv4-1024": ("TPUv4-1024", "TPUv4"),
}
"""Names of Table 4's machines in ``evals.compile.machines``, and of their rows in Table 2."""
SHOWN_PARTS = ("attention", "hops", "gathers", "optimizer")
KERNELS_SHOWN = 15


def minimum_block(stack: TransformerConfig, rate: float, link: float, *, backward: bool = False) -> float:
    """Returns the tokens of a causal ring's block whose compute takes as long as its transfer in bfloat16.

    A device attends at ``rate`` operations, the paper's peak, and sends ``link`` bytes per second.
    """
    # Solves c^2 operations / rate = c bytes / link, with both taken at c = 1.
    work = hop_operations(stack, 1, backward=backward) / rate
    return hop_bytes(stack, 1, 2, backward=backward) / link / work


def absent_steps(model: str, block: int, context: int, devices: int, remat: Remat) -> tuple[Step, Step]:
    """Returns a blockwise step over ``block`` tokens and one on a ring of all devices, in bfloat16."""
    blockwise = LlamaStep(model, "blockwise", block, (None,) * devices, remat=remat)
    return Step.of(blockwise), Step.of(replace(blockwise, method="ring", context=context))


def paper_steps(row: paper.MfuRow, devices: int, remat: Remat = "full") -> tuple[Step, Step]:
    """Returns the blockwise and the ring step of a row of Table 4, in bfloat16.

    A device holds as many tokens at once as the blockwise context has, its limit in Table 3. A batch is
    cut into parts where it has more; where it has fewer sequences than devices, blockwise attention
    still computes one per device, as nothing else would use all devices.
    """
    block, context = row.blockwise_context, row.ring_context
    blockwise, ring = absent_steps(row.model, block, context, devices, remat)
    together = min(row.batch_tokens, devices * block) // context
    return (
        replace(blockwise, accumulation=max(1, row.batch_tokens // (block * devices))),
        replace(ring, ring=devices // together, accumulation=row.batch_tokens // (together * context)),
    )


def project_variants(
    machine: str, model: str, steps: tuple[Step, Step], rates: Rates, torus_link: float | None
) -> list[dict[str, Any]]:
    """Returns a CSV row for the blockwise step, the ring, and the ring with one feature left out at a time.

    ``torus_link`` is the bytes per second of a single link, where ``rates.link`` is of several.
    ``over_blockwise_rate`` is seconds over those that the rate of the projected blockwise step predicts, in
    the model's own operations.
    """
    blockwise, ring = steps
    variants = {
        "blockwise": project(blockwise, rates),
        "ring": project(ring, rates),
        "ring, contiguous order": project(ring, rates, zigzag=False),
        "ring, hops exposed": project(ring, rates, overlap_hops=False),
        "ring, gathers exposed": project(ring, rates, overlap_gathers=False),
    }
    if torus_link is not None:
        variants["ring, one torus link"] = project(ring, replace(rates, link=torus_link))
    rate = blockwise.flops["model"] / sum(variants["blockwise"].values())
    rows = []
    for method, parts in variants.items():
        step, seconds = blockwise if method == "blockwise" else ring, sum(parts.values())
        row = {"projected": True, "machine": machine, "model": model, "method": method, **step.columns()}
        row |= {"peak": rates.peak, "seconds": seconds}
        row |= {f"{part}_seconds": own for part, own in parts.items()}
        all_devices = seconds * step.devices * rates.peak
        row |= {f"mfu_{count}": operations / all_devices for count, operations in step.flops.items()}
        rows.append({**row, "over_blockwise_rate": seconds / (step.flops["model"] / rate)})
    return rows


def project_paper(rates: Rates, remat: Remat = "full") -> list[dict[str, Any]]:
    """All rows of Table 4, at Table 2's peaks and links, with these rates' shares of their own peak."""
    rows: list[dict[str, Any]] = []
    for row in paper.mfu_rows():
        name, interconnect = MACHINE_NAMES[row.hardware]
        target, link = machine(name), paper.interconnects()[interconnect]
        own = rates.of_machine(link.flops, link.link_bandwidth, target.hardware.memory_bandwidth)
        torus = target.hardware.link_bandwidth if target.hardware.platform == "tpu" else None
        rows += project_variants(name, row.model, paper_steps(row, target.devices, remat), own, torus)
    return rows


def project_machine(
    name: str, model: str, block: int, rates: Rates, remat: Remat = "full"
) -> list[dict[str, Any]]:
    """One sequence of ``block`` tokens per device, and one over all, at the machine's own peak and link."""
    devices, hardware = machine(name).devices, machine(name).hardware
    own = rates.of_machine(hardware.flops, hardware.link_bandwidth, hardware.memory_bandwidth)
    steps = absent_steps(model, block, block * devices, devices, remat)
    return project_variants(name, model, steps, own, torus_link=None)


def measured_table(measured: Sequence[Mapping[str, Any]], title: str, notes: Sequence[str]) -> TextTable:
    """Returns the measured steps; medians over rounds with minimum and maximum."""

    def spread(row: Mapping[str, Any], name: str, form: str) -> str:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return f"{row[name]:{form}} ({low:{form}}-{high:{form}})"

    rows = [
        {
            "method": row["method"],
            **_sizes(row),
            "seconds": spread(row, "seconds", ".3g"),
            "tokens/s": f"{row['tokens_a_second']:,.0f}",
            "TFLOP paper": f"{row['flops_paper'] / 1e12:.3g}",
            "TFLOP halved": f"{row['flops_halved'] / 1e12:.3g}",
            "MFU paper": f"{row['mfu_paper']:.1%}",
            "MFU halved": spread(row, "mfu_halved", ".1%"),
            "MFU model": f"{row['mfu_model']:.1%}",
            "by blockwise rate": "" if index == 0 else spread(row, "over_blockwise_rate", ".2f"),
        }
        for index, row in enumerate(measured)
    ]
    lines = (
        "MFU paper counts all pairs of tokens, as the paper does; halved counts those of a causal mask; "
        "model also counts this model's own feedforward and vocabulary.",
        "The last column is actual over expected seconds, by the rate of the blockwise step in the model's "
        "operations. Below 1 is faster than expected. Attention is slower than other products, and a longer "
        "context has more of it.",
    )
    return TextTable(f"Measured: {title}", rows, (*notes, *lines))


def projected_table(rows: Sequence[Mapping[str, Any]], rates_from: str) -> TextTable:
    """Returns the projected steps of other machines."""
    cells = [
        {
            **{name: row[name] for name in ("machine", "model", "method")},
            **_sizes(row),
            "seconds": f"{row['seconds']:.3g}",
            "MFU paper": f"{row['mfu_paper']:.1%}",
            "MFU halved": f"{row['mfu_halved']:.1%}",
            **{part: f"{row[f'{part}_seconds'] / row['seconds']:.1%}" for part in SHOWN_PARTS},
            "by blockwise rate": f"{row['over_blockwise_rate']:.2f}",
        }
        for row in rows
    ]
    notes = (
        f"Rates: {rates_from}, as shares of the peak; projections assume that these shares carry over.",
        "attention, hops, gathers and optimizer are shares of the seconds; hops and gathers are exposed "
        "transfers, so their sum is the loss against a ring with infinitely fast links.",
        "by blockwise rate is projected seconds over those at the rate of the projected blockwise step in "
        "the model's operations. Attention is slower than other products, and a longer context has more of "
        "it: this part is not caused by the ring, and the paper expects it too.",
    )
    return TextTable("Projected, not measured: bfloat16", cells, notes)


def kernel_table(method: str, kernels: Sequence[KernelTime]) -> TextTable:
    """Returns the longest kernels of a profiled step."""
    rows = [
        {"kernel": name[:70], "share": f"{share:.1%}", "ms": f"{1e3 * seconds:.2f}", "runs": str(runs)}
        for name, seconds, runs, share in kernels[:KERNELS_SHOWN]
    ]
    note = "Seconds of all devices; those of a collective include waiting for the others."
    return TextTable(f"Measured: longest kernels of one {method} step", rows, (note,))


def minimum_table() -> TextTable:
    """Returns Table 2: the paper's figures beside those of the same formula and of this project."""
    stack, rows = SHAPES["7B"].llama().transformer, []
    for link in paper.interconnects().values():
        forward, backward = (
            minimum_block(stack, link.flops, link.link_bandwidth, backward=each) for each in (False, True)
        )
        all_pairs = forward / 2  # twice the work of a causal hop
        rows.append(
            {
                "interconnect": link.name,
                "block, paper": f"{link.block_k:g}K",
                "F / B": f"{all_pairs / 1e3:.1f}K",
                "sequence, paper": f"{link.sequence_k:g}K",
                "6 F / B": f"{6 * all_pairs / 1e3:.1f}K",
                "ours, forward": f"{forward / 1e3:.1f}K",
                "ours, backward": f"{backward / 1e3:.1f}K",
            }
        )
    notes = (
        "K is 1000 tokens; at the peak rate and in bfloat16, as in the paper. At lower rates shorter "
        "blocks suffice.",
        "The paper's InfiniBand row is inconsistent: 6 x 24.5 = 147, and 312 / 12.5 = 24.96.",
        "Ours: half of the pairs, as a causal mask needs, and float32 gradients in the backward pass.",
        "The links of the paper's TPU rows are those of a whole chip; one ring uses one link each way.",
    )
    return TextTable("Minimum block and sequence length per device (Table 2)", rows, notes)


def _sizes(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "context": thousands(row["context"]),
        "ring": str(row["ring"]),
        "per device": thousands(row["context"] // row["ring"]),
        "sequences": str(row["sequences"]),
    }
