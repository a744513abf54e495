"""Plots of Table 3: maximum contexts beside the paper's, and memory per device against context."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from agentic_ring.token_units import thousands
from evals.plots import BLUE, GREEN, GREY, ORANGE, PINK, save
from experiments.table3.table import COLUMNS, Row

STYLES = dict(zip(COLUMNS, ((BLUE, "o"), (GREEN, "s"), (ORANGE, "v"), (PINK, "^"), (GREY, "D")), strict=True))
"""Colour and marker by column."""
PANELS_ACROSS = 4


def plot_contexts(path: Path, rows: Sequence[Row]) -> None:
    """Plots one line per row of the table: a marker for each method, hollow where it is the paper's."""
    canvas = Canvas(figsize=(9, 1.6 + 0.36 * len(rows)), layout="constrained")
    axes = canvas.subplots()
    for place, row in enumerate(rows):
        axes.axhline(place, color="0.92", linewidth=0.8, zorder=0)
        for column, (colour, marker) in STYLES.items():
            own, published = row.context(column), row.paper.get(column.method)
            if own:
                axes.plot(own, place, marker, color=colour, markersize=7, label=column.title)
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
    down = -(-len(rows) // PANELS_ACROSS)
    canvas = Canvas(figsize=(14, 2.9 * down), layout="constrained")
    panels = list(canvas.subplots(down, PANELS_ACROSS, squeeze=False).flat)
    for axes, row in zip(panels, rows, strict=False):
        for column, (cell, findings) in row.found.items():
            colour, marker = STYLES[column]
            axes.axhline(findings[0].limit / 1e9, color="black", linewidth=1, linestyle=":")
            known = [(f.context, f.needed / 1e9, f.verdict) for f in findings if f.needed is not None]
            for context, needed, verdict in sorted(known):
                face = colour if verdict == "fits" else "none"
                axes.plot(context, needed, marker, color=colour, mfc=face, label=column.title)
            if known:
                first, last = min(known)[0] // 4, max(known)[0]
                contexts = [first * 2**n for n in range((last // first).bit_length())]
                expected = [cell.expected.bytes(context) / 1e9 for context in contexts]
                axes.plot(contexts, expected, color=colour, linewidth=1, alpha=0.6)
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
    """Draws a legend with one entry per name, which several panels may share: the first, which is filled."""
    named = {}
    for axes in canvas.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    canvas.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False)


def _tokens(axes: Axes) -> None:
    def short(tokens: float, _: int) -> str:
        return f"{tokens / 2**20:g}M" if tokens >= 2**20 else thousands(int(tokens))

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=8))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.set_xlabel("tokens per sequence", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
