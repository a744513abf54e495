"""Learning curves of Table 5: the normalised return of the last trial while each method trains."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from agentic_ring.results.intervals import interquartile_mean_interval, mean_interval
from agentic_ring.results.results_file import origin_columns, write_rows
from evals.plots import GREY, PALETTE, draw_intervals, save
from experiments.table5.cells import TableCell
from experiments.table5.methods import METHODS
from experiments.table5.returns_table import RANDOM, ReturnsTable

ACROSS = 4
"""Panels beside each other."""


def write_learning_curves(folder: Path, table: ReturnsTable) -> None:
    """Writes learning_curves.csv, a row per task, method, seed and share of the updates, and the plot."""
    curves = {method: table.learning_curve(method) for method in table.methods if method != RANDOM}
    if not curves:
        return
    rows = [
        {
            "task": task,
            "method": method,
            "seed": seed,
            "share": share,
            "normalised": score[seed, column],
            **origin_columns(vars(table.results[TableCell(task, method, seed)])),
        }
        for method, (shares, scores) in curves.items()
        for share, score in zip(shares, scores, strict=True)
        for seed in range(table.seeds)
        for column, task in enumerate(table.tasks)
    ]
    write_rows(folder / "learning_curves.csv", rows)
    panels = ["interquartile mean", *table.tasks]
    down = -(-(len(panels) + 1) // ACROSS)  # one place is the legend's
    canvas = Canvas(figsize=(3.6 * ACROSS, 3.2 * down), layout="constrained")
    places: Sequence[Axes] = list(canvas.subplots(down, ACROSS, squeeze=False).flat)
    for number, (axes, title) in enumerate(zip(places, panels, strict=False)):
        for (method, (shares, scores)), colour in zip(curves.items(), PALETTE, strict=False):
            points = [
                interquartile_mean_interval(each) if number == 0 else mean_interval(each[:, number - 1])
                for each in scores
            ]
            style = {"color": colour, "marker": "o", "markersize": 3, "capsize": 2}
            draw_intervals(axes, 100 * np.array(shares), points, label=METHODS[method].title, **style)
        axes.axhline(100, color=GREY, linestyle="--", linewidth=0.8)
        axes.axhline(0, color=GREY, linestyle=":", linewidth=0.8)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_xlabel("share of the updates, %")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    places[len(panels)].legend(*places[0].get_legend_handles_labels(), frameon=False, loc="upper left")
    over = f"; bars: 95% over {table.seeds} training seeds" if table.seeds > 1 else ""
    canvas.supylabel(f"normalised return of the last trial{over}")
    save(canvas, folder / "learning_curves.png")
