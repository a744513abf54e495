"""The tables of Table 4, for the terminal and for table4.md."""

from collections.abc import Sequence

from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import thousands
from evals.utilisation.kernel_times import KernelTime
from evals.utilisation.measured_mfu import MeasuredRow
from evals.utilisation.projection import Step
from experiments import paper
from experiments.table4.projection import ProjectedRow, minimum_block

KERNELS_SHOWN = 15


def measured_table(measured: Sequence[MeasuredRow], title: str, notes: Sequence[str]) -> TextTable:
    """Returns the measured steps; medians over rounds with minimum and maximum."""

    def spread(row: MeasuredRow, name: str, form: str) -> str:
        found = row.spreads.get(name)
        return f"{found.median:{form}} ({found.low:{form}}-{found.high:{form}})" if found else ""

    rows = [
        {
            "method": row.method,
            **_sizes(row.step),
            "seconds": spread(row, "seconds", ".3g"),
            "tokens/s": f"{row.tokens_a_second:,.0f}",
            "TFLOP paper": f"{row.step.flops.paper / 1e12:.3g}",
            "TFLOP halved": f"{row.step.flops.halved / 1e12:.3g}",
            "MFU paper": f"{row.spreads['mfu_paper'].median:.1%}",
            "MFU halved": spread(row, "mfu_halved", ".1%"),
            "MFU model": f"{row.spreads['mfu_model'].median:.1%}",
            "by blockwise rate": spread(row, "over_blockwise_rate", ".2f"),
        }
        for row in measured
    ]
    lines = (
        "MFU paper counts all pairs of tokens, as the paper does; halved counts those of a causal mask; "
        "model also counts this model's own feedforward and vocabulary.",
        "The last column is actual over expected seconds, by the rate of the blockwise step in the model's "
        "operations. Below 1 is faster than expected. Attention is slower than other products, and a longer "
        "context has more of it.",
    )
    return TextTable(f"Measured: {title}", rows, (*notes, *lines))


def projected_table(rows: Sequence[ProjectedRow], rates_from: str) -> TextTable:
    """Returns the projected steps of other machines."""

    def cells(row: ProjectedRow) -> dict[str, str]:
        found = row.projection
        parts = {name: getattr(found, name) for name in ("attention", "hops", "gathers", "optimizer")}
        return {
            "machine": row.machine,
            "model": row.model,
            "method": row.method,
            **_sizes(found.step),
            "seconds": f"{found.seconds:.3g}",
            "MFU paper": f"{found.utilisation(found.step.flops.paper):.1%}",
            "MFU halved": f"{found.utilisation(found.step.flops.halved):.1%}",
            **{name: f"{seconds / found.seconds:.1%}" for name, seconds in parts.items()},
            "by blockwise rate": f"{row.over_blockwise_rate:.2f}",
        }

    notes = (
        f"Rates: {rates_from}, as shares of the peak; projections assume that these shares carry over.",
        "attention, hops, gathers and optimizer are shares of the seconds; hops and gathers are exposed "
        "transfers, so their sum is the loss against a ring with infinitely fast links.",
        "by blockwise rate is projected seconds over those at the rate of the projected blockwise step in "
        "the model's operations. Attention is slower than other products, and a longer context has more of "
        "it: this part is not caused by the ring, and the paper expects it too.",
    )
    return TextTable("Projected, not measured: bfloat16", [cells(row) for row in rows], notes)


def kernel_table(method: str, kernels: Sequence[KernelTime]) -> TextTable:
    """Returns the longest kernels of a profiled step."""
    rows = [
        {
            "kernel": kernel.name[:70],
            "share": f"{kernel.share:.1%}",
            "ms": f"{1e3 * kernel.seconds:.2f}",
            "runs": str(kernel.runs),
        }
        for kernel in kernels[:KERNELS_SHOWN]
    ]
    note = "Seconds of all devices; those of a collective include waiting for the others."
    return TextTable(f"Measured: longest kernels of one {method} step", rows, (note,))


def minimum_table(stack: TransformerConfig) -> TextTable:
    """Returns Table 2: the paper's figures beside those of the same formula and of this project."""
    rows = []
    for link in paper.interconnects().values():
        found = minimum_block(stack, link.flops, link.link_bandwidth)
        rows.append(
            {
                "interconnect": link.name,
                "block, paper": f"{link.block_k:g}K",
                "F / B": f"{found.paper / 1e3:.1f}K",
                "sequence, paper": f"{link.sequence_k:g}K",
                "6 F / B": f"{6 * found.paper / 1e3:.1f}K",
                "ours, forward": f"{found.forward / 1e3:.1f}K",
                "ours, backward": f"{found.backward / 1e3:.1f}K",
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


def _sizes(step: Step) -> dict[str, str]:
    return {
        "context": thousands(step.context),
        "ring": str(step.ring),
        "per device": thousands(step.block),
        "sequences": str(step.sequences),
    }
