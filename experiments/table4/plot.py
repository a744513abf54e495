"""Plot of utilisation: measured steps in one panel, projected ones in another."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from evals.plots import BLUE, ORANGE, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from agentic_ring.errors import ArgumentError
from agentic_ring.results.timing import Spread
from evals.utilisation.measured_mfu import MeasuredRow
from experiments.table4.projection import ProjectedRow


@dataclass(frozen=True)
class Bar:
    """Utilisation of one step by two counts of operations."""

    label: str
    paper: Spread
    halved: Spread


def bars(measured: Sequence[MeasuredRow], projected: Sequence[ProjectedRow]) -> tuple[list[Bar], list[Bar]]:
    """Returns the bars of the plot; of projected steps only those that overlap all they can."""
    ours = [Bar(row.method, row.paper, row.halved) for row in measured]
    theirs = []
    for row in projected:
        if row.method in ("blockwise", "ring"):
            shares = map(row.projection.utilisation, (row.flops.paper, row.flops.halved))
            paper, halved = (Spread.of([share]) for share in shares)
            theirs.append(Bar(f"{row.machine} {row.model} {row.method}", paper, halved))
    return ours, theirs


def plot_mfu(path: Path, measured: Sequence[Bar], projected: Sequence[Bar]) -> None:
    """Draws one panel for measured and one for projected steps, where there are any.

    Raises:
      ArgumentError: no bars at all.
    """
    panels = [(bars, word) for bars, word in ((measured, "measured"), (projected, "projected")) if bars]
    if not panels:
        raise ArgumentError("neither measured nor projected rows; nothing to draw")
    canvas = Canvas(
        figsize=(9, 1.6 + 0.45 * sum(len(bars) for bars, _ in panels)),
        layout="constrained",
    )
    heights = [len(bars) for bars, _ in panels]
    found = canvas.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (bars, word) in zip(found, panels, strict=True):
        _draw(axes, bars, word)
    found[-1].set_xlabel("model FLOPs utilisation, % of peak")
    canvas.legend(*found[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    save(canvas, path)


def _draw(axes: Axes, bars: Sequence[Bar], word: str) -> None:
    places = np.arange(len(bars))
    counts = (("paper's operations", BLUE, -0.2), ("causal attention halved", ORANGE, 0.2))
    for (label, colour, shift), spreads in zip(
        counts, ([bar.paper for bar in bars], [bar.halved for bar in bars]), strict=True
    ):
        medians = np.array([100 * spread.median for spread in spreads])
        below = medians - [100 * spread.low for spread in spreads]
        above = [100 * spread.high for spread in spreads] - medians
        error = [below, above] if word == "measured" else None
        axes.barh(places + shift, medians, 0.38, xerr=error, color=colour, label=label, capsize=3)
    axes.set_yticks(places, [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_title(word, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
