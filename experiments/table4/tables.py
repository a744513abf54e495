"""The tables of Table 4 and Table 2: what is printed and what goes into table4.md."""

from collections.abc import Sequence

from agentic_ring.models.transformer import TransformerConfig
from agentic_ring.tables import TextTable
from agentic_ring.token_units import thousands
from evals.speed.interleaved import Spread
from evals.utilisation.kernel_times import KernelTime
from evals.utilisation.measured_mfu import Measurement
from evals.utilisation.minimum_sequence import minimum_block
from evals.utilisation.projection import Step
from experiments import paper
from experiments.table4.projection import ProjectedRow

KERNELS_SHOWN = 15


def measured_table(measurement: Measurement, model: str, where: str, notes: Sequence[str]) -> TextTable:
    """What was timed here; medians over turns with least and greatest."""
    rows = [
        {
            "method": row.method,
            **_sizes(row.step),
            "seconds": _spread(row.seconds, ".3g"),
            "tokens/s": f"{row.tokens_a_second:,.0f}",
            "TFLOP paper": f"{row.step.flops.paper / 1e12:.3g}",
            "TFLOP halved": f"{row.step.flops.halved / 1e12:.3g}",
            "MFU paper": f"{row.paper.median:.1%}",
            "MFU halved": _spread(row.halved, ".1%"),
            "MFU model": f"{row.model.median:.1%}",
            "by blockwise rate": _spread(row.over_blockwise_rate, ".2f"),
            "by blockwise, parts": _spread(row.over_blockwise_parts, ".2f"),
            "by parts": _spread(row.over_parts, ".2f"),
        }
        for row in measurement.rows
    ]
    lines = (
        f"Utilisation is a share of {measurement.peak}.",
        "MFU paper counts all pairs of tokens, as the paper does; halved counts what a causal mask leaves; "
        "model counts this model's own feedforward and vocabulary as well.",
        "The last three columns are actual over expected seconds: by the rate of the blockwise step in the "
        "model's operations; by its seconds, changed for how much attention the longer context has; by the "
        "rates of single parts alone. Below 1 is faster than expected.",
    )
    return TextTable(f"Measured: {model} on {where}", rows, (*lines, *notes))


def projected_table(rows: Sequence[ProjectedRow], rates_from: str) -> TextTable:
    """What machines that are not here should do."""
    cells = [
        {
            "machine": row.machine,
            "model": row.model,
            "method": row.method,
            **_sizes(row.projection.step),
            "seconds": f"{row.projection.seconds:.3g}",
            "MFU paper": f"{row.projection.utilisation(row.flops.paper):.1%}",
            "MFU halved": f"{row.projection.utilisation(row.flops.halved):.1%}",
            "attention": _share(row, row.projection.attention),
            "hops": _share(row, row.projection.hops),
            "gathers": _share(row, row.projection.gathers),
            "optimizer": _share(row, row.projection.optimizer),
            "by blockwise rate": f"{row.over_blockwise_rate:.2f}",
        }
        for row in rows
    ]
    notes = (
        f"Rates: {rates_from}, as shares of the peak; a projection is as good as these carry over.",
        "attention, hops, gathers and optimizer are shares of the seconds; hops and gathers are what nothing "
        "hides of transfers, so their sum is what a ring loses against one with free links.",
        "by blockwise rate is projected seconds over those at the rate of the projected blockwise step in "
        "the model's operations. Attention is slower than other products, and a longer context has more of "
        "it: that part is no fault of the ring, and the paper expects it too.",
    )
    return TextTable("Projected, not measured: bfloat16", cells, notes)


def minimum_table(stack: TransformerConfig) -> TextTable:
    """Table 2, the paper's figures beside those of the same model of time."""
    rows = []
    for link in paper.interconnects().values():
        found = minimum_block(stack, link.flops, link.link_bandwidth)
        rows.append(
            {
                "interconnect": link.name,
                "block, paper": f"{link.block_k:g}K",
                "F / B": f"{found.paper / 1e3:.1f}K",
                "sequence, paper": f"{link.sequence_k:g}K",
                "6 F / B": f"{found.paper_sequence / 1e3:.1f}K",
                "ours, forward": f"{found.forward / 1e3:.1f}K",
                "ours, backward": f"{found.backward / 1e3:.1f}K",
            }
        )
    notes = (
        "K is 1000 tokens; at the peak rate and in bfloat16, as in the paper. Below its peak a device needs "
        "shorter blocks.",
        "The paper's InfiniBand row does not agree with itself: 6 x 24.5 = 147, and 312 / 12.5 = 24.96.",
        "Ours: half of the pairs, which is what a causal mask leaves, and in the backward float32 gradients.",
        "The links of the paper's TPU rows are those of a whole chip; one ring uses one link each way.",
    )
    return TextTable("Minimal block and sequence a device (Table 2)", rows, notes)


def kernel_table(method: str, kernels: Sequence[KernelTime]) -> TextTable:
    """The longest kernels of a traced step."""
    rows = [
        {
            "kernel": kernel.name[:70],
            "share": f"{kernel.share:.1%}",
            "ms": f"{1e3 * kernel.seconds:.2f}",
            "runs": str(kernel.runs),
        }
        for kernel in kernels[:KERNELS_SHOWN]
    ]
    note = "Seconds of all devices; those of a collective count waiting for the others."
    return TextTable(f"Measured: longest kernels of one {method} step", rows, (note,))


def _sizes(step: Step) -> dict[str, str]:
    return {
        "context": thousands(step.context),
        "ring": str(step.ring),
        "a device": thousands(step.block),
        "sequences": str(step.sequences),
    }


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    return f"{spread.median:{form}} ({spread.low:{form}}-{spread.high:{form}})"


def _share(row: ProjectedRow, seconds: float) -> str:
    return f"{seconds / row.projection.seconds:.1%}"
