"""Plot of a model that relabelled trajectories tell the task: returns by their number, and its own trials."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from agentic_ring.results.intervals import Interval, mean_interval
from agentic_ring.results.results_file import Figure
from agentic_ring.rollouts.returns import trial_intervals
from agentic_ring.rollouts.told_returns import ToldReport
from evals.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Canvas,
    draw_intervals,
    save,
)

_MAIN = {"marker": "o", "capsize": 4, "linewidth": 2}
_CONTROLS = {
    "zeroed": ("rewards zeroed", PINK),
    "shuffled": ("rewards shuffled", SKY),
    "another_task": ("another task's", VERMILION),
}
"""Label and colour of each control."""


def draw_contexts(
    axes: Axes, told: Mapping[int, Interval | Figure], controls: Mapping[str, Interval | Figure]
) -> None:
    """Draws returns by the number of stored trajectories; beside the largest one, its controls by name."""
    counts = list(told)
    draw_intervals(
        axes, range(len(counts)), [*told.values()], color=BLUE, label="relabelled for this task", **_MAIN
    )
    for index, (name, interval) in enumerate(controls.items()):
        label, colour = _CONTROLS[name]
        style = {"color": colour, "marker": "s", "label": f"{counts[-1]}, {label}"}
        draw_intervals(axes, [len(counts) - 0.7 + 0.15 * index], [interval], capsize=4, **style)
    axes.set_xticks(range(len(counts)), map(str, counts))
    axes.set_xlabel("stored trajectories in context")


def plot_told_returns(path: Path, task: str, report: ToldReport) -> None:
    """Plots returns by the number of stored trajectories, with the controls, and trial by trial."""
    canvas = Canvas(figsize=(11, 5), layout="constrained")
    left, right = canvas.subplots(1, 2, sharey=True)
    canvas.suptitle(f"{task}: what relabelled trajectories tell", fontweight="bold")
    told = {count: mean_interval(returns, "environments") for count, returns in report.by_context.items()}
    controls = {name: mean_interval(returns, "environments") for name, returns in report.controls.items()}
    draw_contexts(left, told, controls)
    left.set_ylabel("mean return (sum of rewards)\nbars: 95% over environments")
    trials = range(1, report.own_trials.shape[1] + 1)
    own, behind = map(trial_intervals, (report.own_trials, report.behind))
    draw_intervals(right, trials, own, color=ORANGE, label="trials with nothing stored", **_MAIN)
    draw_intervals(right, trials, behind, color=BLUE, label=f"trials after {max(told)}", **_MAIN)
    right.set_xlabel("trial (after all earlier ones in context)")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        lines = [
            (np.max(report.data), GREEN, "--", "best of the data"),
            (np.quantile(report.data, 0.95), GREEN, "-.", "95th percentile of the data"),
            (np.mean(report.random_policy), GREY, ":", "random policy"),
        ]
        if report.cloned is not None:
            lines.append((np.mean(report.cloned), "black", (0, (1, 3)), "trained on this task alone"))
        for value, colour, linestyle, label in lines:
            named = f"{label}, {value:.0f}" if axes is left else None
            axes.axhline(value, color=colour, linestyle=linestyle, label=named)
    left.set_ylim(bottom=0)
    entries = [axes.get_legend_handles_labels() for axes in (left, right)]
    handles, labels = ([x for part in parts for x in part] for parts in zip(*entries, strict=True))
    canvas.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(canvas, path)
