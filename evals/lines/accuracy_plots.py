"""Plots of line retrieval: accuracy against prompt length, and by depth."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, NullLocator

from agentic_ring.token_units import short_tokens
from evals.common.plots import BLUE, ORANGE, error_bars, save, titled_canvas
from evals.lines.scores import Rule, SetScore

DEPTH_BINS = 5
MISSES_TO_HITS = LinearSegmentedColormap.from_list("misses to hits", [ORANGE, "#F7F7F7", BLUE])


def plot_accuracy(path: Path, name: str, scores: Sequence[SetScore], rule: Rule) -> None:
    """Plots the accuracy of each answered set, with its 95% interval, against its prompt length."""
    canvas, axes = titled_canvas(f"line retrieval: {name}")
    scores = [score for score in scores if score.answered]
    accuracies = [score.accuracy(rule) for score in scores]
    axes.errorbar(
        [score.prompt_tokens for score in scores],
        [accuracy.value for accuracy in accuracies],
        yerr=error_bars(accuracies),
        color=BLUE,
        marker="o",
        capsize=4,
        linewidth=2,
    )
    accuracy_axes(axes, [score.prompt_tokens for score in scores])
    axes.set_ylabel(f"accuracy ({rule} number of an answer); bars: 95%")
    save(canvas, path)


def accuracy_axes(axes: Axes, tokens: Sequence[float]) -> None:
    """Sets up axes of accuracy against prompt tokens, with ticks at powers of two."""
    axes.set_xscale("log", base=2)
    powers = 2.0 ** np.arange(np.floor(np.log2(min(tokens))), np.ceil(np.log2(max(tokens))) + 1)
    axes.set_xticks(powers)
    axes.set_xlim(powers[0] / 1.2, powers[-1] * 1.2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_tokens(round(tokens)).upper()))
    axes.set_xlabel("prompt tokens")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def plot_depths(path: Path, name: str, scores: Sequence[SetScore], rule: Rule) -> None:
    """Plots accuracy with a column for each set and a row for each fifth of the depth: right/asked."""
    scores = [score for score in scores if score.answered]
    asked, right = np.zeros((2, DEPTH_BINS, len(scores)), int)
    for column, score in enumerate(scores):
        for row, hit in zip(score.answered, score.right(rule), strict=True):
            depth = int(row.depth * DEPTH_BINS)
            asked[depth, column] += 1
            right[depth, column] += hit
    shares = np.divide(right, asked, out=np.full(asked.shape, np.nan), where=asked > 0)
    canvas, axes = titled_canvas(f"line retrieval by depth: {name}")
    image = axes.imshow(shares, cmap=MISSES_TO_HITS, vmin=0, vmax=1, aspect="auto")
    for (depth, column), share in np.ndenumerate(shares):
        colour = "white" if share > 0.8 else "black"
        text = f"{right[depth, column]}/{asked[depth, column]}"
        axes.text(column, depth, text, color=colour, ha="center", va="center")
    axes.set_xticks(range(len(scores)), [score.name for score in scores])
    edges = [f"{100 * edge // DEPTH_BINS} to {100 * (edge + 1) // DEPTH_BINS}%" for edge in range(DEPTH_BINS)]
    axes.set_yticks(range(DEPTH_BINS), edges)
    axes.set_xlabel("set of cases")
    axes.set_ylabel("depth of the line in the record")
    canvas.colorbar(image, ax=axes, label=f"accuracy ({rule} number of an answer)")
    save(canvas, path)
