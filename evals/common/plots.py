"""The three plots of a run: training loss, return per trial, and the returns of the data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from agentic_ring.errors import ArgumentError
from agentic_ring.files import replacing
from evals.common.intervals import Interval

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
GREY = "#595959"


def plot_loss(
    path: Path,
    task: str,
    rows: Sequence[Mapping[str, Any]],
    quantity: str = "mean squared error of the action",
) -> None:
    """Training loss over steps, raw and as a running mean.

    Args:
      path: of the PNG.
      task: for the title, such as ``walker_run``.
      rows: of ``metrics.jsonl``; those that have ``step`` and ``loss`` are drawn.
      quantity: what the loss is.

    Raises:
      ArgumentError: no row has both.
    """
    canvas, axes = titled_canvas(f"{task}: training loss")
    draw_loss(axes, rows, BLUE)
    axes.set_ylabel(quantity)
    axes.legend(frameon=False)
    save(canvas, path)


def draw_loss(axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str, run: str = "") -> None:
    """The curves of ``plot_loss``, on axes where those of other runs may stand; errors as there."""
    pairs = [(row["step"], row["loss"]) for row in rows if "step" in row and "loss" in row]
    if not pairs:
        raise ArgumentError(f"none of {len(rows)} metric rows has both 'step' and 'loss'; nothing to draw")
    steps, losses = np.array(pairs, np.float64).T
    name = f"{run}, " if run else ""
    axes.plot(steps, losses, color=colour, alpha=0.35, linewidth=1, label=f"{name}each logged step")
    window = max(1, len(losses) // 20)
    if window > 1:
        weights = np.full(window, 1 / window)
        centres = np.convolve(steps, weights, mode="valid")
        means = np.convolve(losses, weights, mode="valid")
        axes.plot(centres, means, color=colour, linewidth=2, label=f"{name}mean of {window} logged steps")
    axes.set_xlabel("optimiser step")


def plot_trial_returns(
    path: Path,
    task: str,
    trials: Sequence[Interval],
    *,
    random_policy: Interval,
    data_median: float,
    data_best: float,
) -> None:
    """Mean return of each trial with its 95% interval, between the lines it is to be judged by.

    Args:
      path: of the PNG.
      task: for the title.
      trials: one estimate for each trial, in order.
      random_policy: uniform actions in the same environments; its interval is shaded.
      data_median: median return of the training trajectories.
      data_best: their highest return.
    """
    canvas, axes = titled_canvas(f"{task}: return of each trial")
    numbers = np.arange(1, len(trials) + 1)
    values = np.array([trial.value for trial in trials])
    axes.errorbar(
        numbers,
        values,
        yerr=error_bars(trials),
        color=BLUE,
        marker="o",
        capsize=4,
        linewidth=2,
        label=f"Agentic Transformer ({trials[0].n} environments)",
    )
    axes.axhline(data_best, color=GREEN, linestyle="--", label=f"best of the data, {data_best:.0f}")
    axes.axhline(data_median, color=ORANGE, linestyle="-.", label=f"median of the data, {data_median:.0f}")
    axes.axhline(
        random_policy.value, color=GREY, linestyle=":", label=f"random policy, {random_policy.value:.0f}"
    )
    if random_policy.low is not None and random_policy.high is not None:
        axes.axhspan(random_policy.low, random_policy.high, color=GREY, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("trial, with all earlier ones in context")
    axes.set_ylabel("mean return (sum of rewards); bars: 95%")
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
    """How the training trajectories' returns are spread, by the algorithm that collected them.

    Args:
      path: of the PNG.
      task: for the title.
      returns: one a trajectory.
      algorithms: what collected each trajectory, in the same order.
      random_policy: mean return of uniform actions.
      last_trial: mean return of the last trial.

    Raises:
      ArgumentError: no trajectories, or not one algorithm for each.
    """
    canvas, axes = titled_canvas(f"{task}: returns of the training trajectories")
    draw_data_returns(axes, returns, algorithms)
    axes.axvline(random_policy, color="black", linestyle=":", label=f"random policy, {random_policy:.0f}")
    axes.axvline(last_trial, color="black", linestyle="--", label=f"last trial, {last_trial:.0f}")
    legend_below(canvas, axes)
    save(canvas, path)


def draw_data_returns(
    axes: Axes, returns: Sequence[float] | np.ndarray, algorithms: Sequence[str] | np.ndarray
) -> None:
    """The stacked histogram of ``plot_data_returns``; arguments and errors as there."""
    returns = np.asarray(returns, np.float64)
    if returns.size == 0 or returns.size != len(algorithms):
        raise ArgumentError(
            f"{returns.size} returns and {len(algorithms)} algorithms; one of each a trajectory"
        )
    # The largest group lowest in the stack, so that the small ones stay visible on top.
    names = sorted(set(algorithms), key=lambda name: (-list(algorithms).count(name), name))
    groups = [returns[np.array(algorithms) == name] for name in names]
    axes.hist(
        groups,
        bins=np.histogram_bin_edges(returns, bins=30).tolist(),
        stacked=True,
        color=[(BLUE, ORANGE, GREEN, PINK, GREY)[index % 5] for index in range(len(names))],
        label=[f"{name} ({len(group)})" for name, group in zip(names, groups, strict=True)],
    )
    axes.set_xlabel("return (sum of rewards)")
    axes.set_ylabel("trajectories")


def titled_canvas(title: str) -> tuple[Canvas, Axes]:
    """One panel with a title, to be drawn on and given to ``save``."""
    # Figure and canvas without pyplot: no global state, no display, nothing to close.
    canvas = Canvas(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    return canvas, axes


def error_bars(intervals: Sequence[Interval]) -> np.ndarray:
    """[2, trials] distances below and above the values; 0 where there is no interval."""
    below = [0.0 if interval.low is None else interval.value - interval.low for interval in intervals]
    above = [0.0 if interval.high is None else interval.high - interval.value for interval in intervals]
    return np.maximum(0.0, [below, above])


def legend_below(canvas: Canvas, axes: Axes) -> None:
    """A legend of two columns under the panel."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


def save(canvas: Canvas, path: Path) -> None:
    """Writes the canvas as PNG, all of it or nothing."""
    with replacing(path) as beside:
        canvas.savefig(beside, format="png", dpi=150)
