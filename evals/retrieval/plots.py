"""Plots of line retrieval: accuracy against prompt length, by depth, and by lines that share a word."""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, NullLocator

from agentic_ring.token_units import short_tokens
from evals.plots import BLUE, ORANGE, Canvas, draw_intervals, save, titled_canvas
from evals.retrieval.prediction_log import Prediction
from evals.retrieval.scores import SetScore
from evals.retrieval.tasks import Rule

DEPTH_BINS = 5
PARTNER_BINS = {"none": 1, "1 to 3": 4, "4 to 15": 16, "16 to 63": 64, "64 to 127": 128, "128 or more": None}
"""Labels of numbers of lines that share a word with a key, and the number at which the next bin begins."""
MISSES_TO_HITS = LinearSegmentedColormap.from_list("misses to hits", [ORANGE, "#F7F7F7", BLUE])


def plot_accuracy(path: Path, name: str, scores: Sequence[SetScore], rule: Rule) -> None:
    """Plots the accuracy of each answered set, with its 95% interval, against its prompt length."""
    canvas, axes = titled_canvas(f"line retrieval: {name}")
    scores = [score for score in scores if score.answered()]
    accuracies = [score.accuracy(rule) for score in scores]
    tokens = [score.prompt_tokens for score in scores]
    draw_intervals(axes, tokens, accuracies, color=BLUE, marker="o", capsize=4, linewidth=2)
    accuracy_axes(axes, tokens)
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
    edges = [f"{100 * edge // DEPTH_BINS} to {100 * (edge + 1) // DEPTH_BINS}%" for edge in range(DEPTH_BINS)]
    canvas, axes = titled_canvas(f"line retrieval by depth: {name}")
    axes.set_ylabel("depth of the line in the record")
    _draw_shares(canvas, axes, scores, rule, edges, lambda row: int(row.depth * DEPTH_BINS))
    save(canvas, path)


def plot_word_partners(path: Path, name: str, scores: Sequence[SetScore], rule: Rule) -> None:
    """Plots accuracy by set and by the number of other lines that share a word with the key: right/asked.

    Nothing is written if no question has such a number.
    """
    if all(row.word_partners is None for score in scores for row in score.answered()):
        return
    bins = [first for first in PARTNER_BINS.values() if first is not None]

    def group(row: Prediction) -> int | None:
        return None if row.word_partners is None else bisect(bins, row.word_partners)

    canvas, axes = titled_canvas(f"line retrieval by lines that share a word: {name}")
    axes.set_ylabel("other lines with the key's adjective or noun")
    _draw_shares(canvas, axes, scores, rule, list(PARTNER_BINS), group)
    save(canvas, path)


def _draw_shares(
    canvas: Canvas,
    axes: Axes,
    scores: Sequence[SetScore],
    rule: Rule,
    labels: Sequence[str],
    group: Callable[[Prediction], int | None],
) -> None:
    """Draws right/asked with a column for each answered set and a row for each of the ``labels``.

    ``group`` is the row of a prediction; those of None are left out.
    """
    scores = [score for score in scores if score.answered()]
    asked, right = np.zeros((2, len(labels), len(scores)), int)
    for column, score in enumerate(scores):
        for prediction, hit in zip(score.answered(), score.right(rule), strict=True):
            row = group(prediction)
            if row is not None:
                asked[row, column] += 1
                right[row, column] += hit
    shares = np.divide(right, asked, out=np.full(asked.shape, np.nan), where=asked > 0)
    texts = {at: f"{right[at]}/{asked[at]}" for at in np.ndindex(*shares.shape)}
    draw_shares(
        canvas,
        axes,
        shares,
        texts,
        labels,
        [score.name for score in scores],
        f"accuracy ({rule} number of an answer)",
    )
    axes.set_xlabel("set of cases")


def draw_shares(
    canvas: Canvas,
    axes: Axes,
    shares: np.ndarray,
    texts: Mapping[tuple[int, ...], str],
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
) -> None:
    """Draws shares [rows, columns] as colours, with the text of each position; ``label`` says of what."""
    image = axes.imshow(shares, cmap=MISSES_TO_HITS, vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        colour = "white" if share > 0.8 else "black"
        axes.text(column, row, texts.get((row, column), ""), color=colour, ha="center", va="center")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    canvas.colorbar(image, ax=axes, label=label)
