"""The tables of Table 4, for the terminal and for table4.md."""

from collections.abc import Sequence

from agentic_ring.results.timing import Spread
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import thousands
from evals.utilisation.kernel_times import KernelTime
from evals.utilisation.measured_mfu import Measurement
from evals.utilisation.projection import Step
from experiments.table4.projection import ProjectedRow

KERNELS_SHOWN = 15


def measured_table(measurement: Measurement, model: str, where: str, notes: Sequence[str]) -> TextTable:
    """Returns the measured steps; medians over rounds with minimum and maximum."""
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
        "MFU paper counts all pairs of tokens, as the paper does; halved counts those of a causal mask; "
        "model also counts this model's own feedforward and vocabulary.",
        "The last three columns are actual over expected seconds: by the rate of the blockwise step in the "
        "model's operations; by its seconds, corrected for the longer context's share of attention; by the "
        "rates of single parts. Below 1 is faster than expected.",
    )
    return TextTable(f"Measured: {model} on {where}", rows, (*lines, *notes))


def projected_table(rows: Sequence[ProjectedRow], rates_from: str) -> TextTable:
    """Returns the projected steps of other machines."""
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


def _sizes(step: Step) -> dict[str, str]:
    return {
        "context": thousands(step.context),
        "ring": str(step.ring),
        "per device": thousands(step.block),
        "sequences": str(step.sequences),
    }


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    return f"{spread.median:{form}} ({spread.low:{form}}-{spread.high:{form}})"


def _share(row: ProjectedRow, seconds: float) -> str:
    return f"{seconds / row.projection.seconds:.1%}"
