"""Table 5 as a picture: the methods in order, each task a dot."""

from pathlib import Path

import numpy as np

from evals.common.plots import BLUE, GREY, ORANGE, error_bars, legend_below, save, titled_canvas
from experiments.table5.methods import METHODS
from experiments.table5.returns_table import ReturnsTable


def plot_returns(path: Path, table: ReturnsTable) -> None:
    """Interquartile means of normalised last trials with their intervals, and every task and seed."""
    canvas, axes = titled_canvas("Table 5: return of the last trial, normalised")
    intervals = [interval for _, interval in table.order]
    places = np.arange(len(intervals))
    for place, (method, _) in enumerate(table.order):
        scores = table.scores(method).ravel()
        label = "each task and seed" if place == 0 else None
        axes.plot(np.full(len(scores), place), scores, ".", color=ORANGE, alpha=0.6, label=label)
    values = [interval.value for interval in intervals]
    axes.errorbar(
        places,
        values,
        yerr=error_bars(intervals),
        color=BLUE,
        marker="o",
        linestyle="none",
        capsize=4,
        label="IQM" if table.seeds == 1 else f"IQM, 95% over {table.seeds} training seeds",
    )
    axes.axhline(100, color=GREY, linestyle="--", label="95th percentile of the training returns")
    axes.axhline(0, color=GREY, linestyle=":", label="random policy")
    axes.set_xticks(places, [METHODS[method].title for method, _ in table.order], rotation=30, ha="right")
    axes.set_ylabel("normalised return")
    legend_below(canvas, axes)
    save(canvas, path)
