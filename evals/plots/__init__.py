"""Plots of a run: training loss, return per trial, and returns of the training data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from agentic_ring.files.atomic import replacing
from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, GREY = "#56B4E9", "#D55E00", "#595959"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, GREY)
"""Colours of things that are not told apart otherwise, in the order in which they are used up."""


def plot_loss(
    path: Path,
    task: str,
    rows: Sequence[Mapping[str, Any]],
    quantity: str = "mean squared error of the action",
) -> None:
    """Plots the loss, labelled ``quantity``, over optimiser steps; rows as in ``draw_loss``."""
    canvas, axes = titled_canvas(f"{task}: training loss")
    draw_loss(axes, rows, BLUE)
    axes.set_ylabel(quantity)
    axes.legend(frameon=False)
    save(canvas, path)


def draw_loss(axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str, run: str = "") -> None:
    """Draws a run's loss, raw and as a running mean, on axes that several runs may share.

    Those ``rows`` of ``metrics.jsonl`` are drawn that have ``step`` and ``loss``; ``run`` names it in the
    legend.
    """
    pairs = [(row["step"], row["loss"]) for row in rows if "step" in row and "loss" in row]
    steps, losses = np.array(pairs, np.float64).reshape(-1, 2).T
    name = f"{run}, " if run else ""
    axes.plot(steps, losses, color=colour, alpha=0.35, linewidth=1, label=f"{name}each logged step")
    window = max(1, len(losses) // 20)
    if window > 1:
        weights = np.full(window, 1 / window)
        centres, means = (np.convolve(each, weights, mode="valid") for each in (steps, losses))
        axes.plot(centres, means, color=colour, linewidth=2, label=f"{name}mean of {window} logged steps")
    axes.set_xlabel("optimiser step")


def plot_trial_returns(
    path: Path,
    task: str,
    trials: Sequence[Interval],
    *,
    no_context: Sequence[Interval],
    random_policy: Interval,
    data_median: float,
    data_best: float,
) -> None:
    """Plots the mean return of each trial with its 95% interval, and reference lines.

    Args:
      trials: an estimate for each trial, in order.
      no_context: the same trials, each with an empty context.
      random_policy: return of uniform actions in the same environments; its interval is shaded.
      data_median, data_best: median and highest return of the training trajectories.
    """
    canvas, axes = titled_canvas(f"{task}: return of each trial")
    ours = {"label": f"Agentic Transformer ({trials[0].n} environments)", "color": BLUE, "marker": "o"}
    ours |= {"capsize": 4, "linewidth": 2}
    alone = {"label": "the same trials without context", "color": PINK, "marker": "s", "markersize": 4}
    alone |= {"capsize": 3, "linestyle": "--"}
    for intervals, style in ((trials, ours), (no_context, alone)):
        draw_intervals(axes, range(1, len(intervals) + 1), intervals, **style)
    for value, color, linestyle, name in (
        (data_best, GREEN, "--", "best of the data"),
        (data_median, ORANGE, "-.", "median of the data"),
        (random_policy.value, GREY, ":", "random policy"),
    ):
        axes.axhline(value, color=color, linestyle=linestyle, label=f"{name}, {value:.0f}")
    if random_policy.low is not None and random_policy.high is not None:
        axes.axhspan(random_policy.low, random_policy.high, color=GREY, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("trial (after all earlier ones in context)")
    axes.set_ylabel("mean return (sum of rewards)\nbars: 95% over environments")
    legend_below(canvas, axes)
    save(canvas, path)


def plot_data_returns(
    path: Path,
    task: str,
    returns: Sequence[float] | np.ndarray,
    algorithms: Sequence[str],
    *,
    random_policy: float,
    last_trial: float,
) -> None:
    """Plots ``draw_data_returns`` with the mean returns of uniform actions and of the last trial."""
    canvas, axes = titled_canvas(f"{task}: returns of the training trajectories")
    draw_data_returns(axes, returns, algorithms)
    axes.axvline(random_policy, color="black", linestyle=":", label=f"random policy, {random_policy:.0f}")
    axes.axvline(last_trial, color="black", linestyle="--", label=f"last trial, {last_trial:.0f}")
    legend_below(canvas, axes)
    save(canvas, path)


def draw_data_returns(
    axes: Axes, returns: Sequence[float] | np.ndarray, algorithms: Sequence[str] | np.ndarray
) -> None:
    """Draws a histogram of trajectories' returns, by the algorithm that collected each."""
    returns = np.asarray(returns, np.float64)
    # The largest group is at the bottom of the stack, so that small ones stay visible.
    names = sorted(set(algorithms), key=lambda name: (-list(algorithms).count(name), name))
    groups = [returns[np.array(algorithms) == name] for name in names]
    labels = [f"{name} ({len(group)})" for name, group in zip(names, groups, strict=True)]
    colours = [PALETTE[index % len(PALETTE)] for index in range(len(names))]
    bins = np.histogram_bin_edges(returns, bins=30).tolist()
    axes.hist(groups, bins=bins, stacked=True, color=colours, label=labels)
    axes.set_xlabel("return (sum of rewards)")
    axes.set_ylabel("trajectories")


def titled_canvas(title: str) -> tuple[Canvas, Axes]:
    """A canvas with one titled panel, for ``save``."""
    # Without pyplot there is no global state, no display and nothing to close.
    canvas = Canvas(figsize=(7, 4.5), layout="constrained")
    axes = canvas.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    return canvas, axes


def error_bars(intervals: Sequence[Interval | Figure]) -> np.ndarray:
    """Distances [2, trials] of the bounds from the values; 0 without an interval."""
    below = [0.0 if interval.low is None else interval.value - interval.low for interval in intervals]
    above = [0.0 if interval.high is None else interval.high - interval.value for interval in intervals]
    return np.maximum(0.0, [below, above])


def draw_intervals(
    axes: Axes, places: Sequence[float] | np.ndarray, intervals: Sequence[Interval | Figure], **style: Any
) -> None:
    """Draws estimates with their intervals at these places; ``style`` is that of ``errorbar``."""
    values = [interval.value for interval in intervals]
    axes.errorbar(places, values, yerr=error_bars(intervals), **style)


def legend_below(canvas: Canvas, axes: Axes) -> None:
    """Adds a legend of two columns below the panel."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


def save(canvas: Canvas, path: Path) -> None:
    """Writes the canvas as a PNG file, atomically."""
    with replacing(path) as beside:
        canvas.savefig(beside, format="png", dpi=150)
