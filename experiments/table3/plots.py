"""Plots of Table 3: maximum contexts beside the paper's, and memory per device against context."""

from collections.abc import Sequence
from pathlib import Path

from evals.plots import BLUE, GREEN, GREY, ORANGE, PINK, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from agentic_ring.token_units import thousands
from evals.compile.maximum_context import Cell, Finding
from experiments.table3.table import COLUMNS, Row

STYLES = {
    ("ring", "full"): (BLUE, "o"),
    ("ring", "offload"): (GREEN, "s"),
    ("blockwise", "full"): (ORANGE, "v"),
    ("memory_efficient", "full"): (PINK, "^"),
    ("vanilla", "full"): (GREY, "D"),
}
"""Colour and marker by method and by the memory that holds each layer's input."""


def plot_contexts(path: Path, rows: Sequence[Row]) -> None:
    """Plots one line per row of the table: a marker for each method, hollow where it is the paper's."""
    canvas = Canvas(figsize=(9, 1.6 + 0.36 * len(rows)), layout="constrained")
    axes = canvas.subplots()
    for place, row in enumerate(rows):
        axes.axhline(place, color="0.92", linewidth=0.8, zorder=0)
        for column in COLUMNS:
            colour, marker = STYLES[column.method, column.remat]
            own = row.context(column)
            if own:
                axes.plot(own, place, marker, color=colour, markersize=7, label=column.title)
            published = row.paper.get(column.method)
            if published and column.remat == "full":
                axes.plot(published, place - 0.22, marker, color=colour, markersize=5, mfc="none")
    axes.set_yticks(range(len(rows)), [f"{row.hardware}  {row.model}" for row in rows])
    axes.invert_yaxis()
    _tokens(axes)
    title = "maximum context that compiles (small and hollow: the paper's)"
    axes.set_title(title, loc="left", fontweight="bold")
    _legend(canvas)
    save(canvas, path)


def plot_memory(path: Path, rows: Sequence[Row]) -> None:
    """Plots one panel per row: compiled bytes per device at each context, the formula, and the limit."""
    across = 4
    down = -(-len(rows) // across)
    canvas = Canvas(figsize=(14, 2.9 * down), layout="constrained")
    panels = list(canvas.subplots(down, across, squeeze=False).flat)
    for axes, row in zip(panels, rows, strict=False):
        for column, found in row.found.items():
            known = sorted((f for f in found if f.needed is not None), key=lambda f: f.context)
            if known:
                colour, marker = STYLES[column.method, column.remat]
                _draw(axes, known, colour, marker, column.title)
        if found := [finding for findings in row.found.values() for finding in findings]:
            axes.axhline(found[0].limit / 1e9, color="black", linewidth=1, linestyle=":")
        _tokens(axes)
        axes.set_title(f"{row.hardware}, {row.model}", loc="left", fontsize=9, fontweight="bold")
        axes.set_ylabel("GB per device", fontsize=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    _legend(canvas)
    canvas.suptitle(
        "filled: fits; hollow: does not (TPUs: a lower bound); lines: the formula; dotted: the limit"
    )
    save(canvas, path)


def _legend(canvas: Canvas) -> None:
    """Draws a legend with one entry per name, which several panels may share."""
    named = {}
    for axes in canvas.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)  # the first, which is filled
    canvas.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False)


def _draw(axes: Axes, known: Sequence[Finding], colour: str, marker: str, title: str) -> None:
    for finding in known:
        face = colour if finding.verdict == "fits" else "none"
        axes.plot(finding.context, (finding.needed or 0) / 1e9, marker, color=colour, mfc=face, label=title)
    cell: Cell = known[0].cell
    first, last = known[0].context // 4, known[-1].context
    contexts = [first * 2**n for n in range((last // first).bit_length())]
    expected = [cell.expected().bytes(context) / 1e9 for context in contexts]
    axes.plot(contexts, expected, color=colour, linewidth=1, alpha=0.6)


def _tokens(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=8))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.set_xlabel("tokens per sequence", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _short(tokens: float, _: int) -> str:
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else thousands(int(tokens))
