"""Charts of a report as inline ``<svg>`` elements: loss, returns of the data, attention."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import PercentFormatter

from agentic_ring.results.results_file import Figure
from agentic_ring.rollouts.returns import EvaluationRecord
from evals.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PINK,
    SKY,
    VERMILION,
    draw_data_returns,
    draw_loss,
)
from evals.report_page.attention_over_trials import TrialAttention

# In points, which the page scales to its column. A phone is this narrow, so 9-point text stays readable.
WIDTH, HEIGHT = 370, 250
INK = "#000000"
VARIABLES = {
    INK: "--ink",
    BLUE: "--blue",
    ORANGE: "--orange",
    GREEN: "--green",
    PINK: "--pink",
    SKY: "--sky",
    VERMILION: "--vermilion",
    GREY: "--grey",
}
"""CSS variable of the page for each colour of the charts."""
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "legend.fontsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextmanager
def chart(parts: list[str], description: str, height: int = HEIGHT) -> Iterator[Axes]:
    """Axes to draw on; when the block ends, the chart is added to ``parts`` as an ``<svg>`` element.

    Args:
      parts: list of the page's elements.
      description: the chart in words, for screen readers.
      height: height in points.
    """
    # The salt makes the ids of markers and clip paths differ from those of the page's other charts.
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": description}
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=(WIDTH / 72, height / 72), layout="constrained")
        axes = canvas.add_subplot()
        yield axes
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True)
    parts.append(_for_page(buffer.getvalue(), description))


def _for_page(svg: str, description: str) -> str:
    """The ``<svg>`` element only, without prologue, metadata, group ids, fixed size and fixed colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib numbers groups, so two charts would share ids
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    opening = f'<svg class="chart" {view_box[0]} role="img" aria-label="{escape(description)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    for colour, variable in VARIABLES.items():
        svg = re.sub(colour, f"var({variable})", svg, flags=re.IGNORECASE)
    return svg


def loss_chart(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Chart of the training losses of all runs, by name; None if no run has any."""
    if not metrics:
        return None
    parts: list[str] = []
    finals = "; ".join(f"{run} ends at {rows[-1]['loss']:.4g}" for run, rows in metrics.items())
    with chart(parts, f"Training loss over optimiser steps. {finals}", 225 + 12 * len(metrics)) as axes:
        for index, (run, rows) in enumerate(metrics.items()):
            draw_loss(axes, rows, PALETTE[index % len(PALETTE)], run if len(metrics) > 1 else "")
        axes.set_ylabel("loss")
        if all(row["loss"] > 0 for rows in metrics.values() for row in rows):
            axes.set_yscale("log")
        legend(axes)
    return parts[0]


def data_chart(record: EvaluationRecord, figures: Sequence[Figure], run: str) -> str:
    """Histogram of the training returns by collecting algorithm, with the run's own returns marked."""
    parts: list[str] = []
    named = {figure.name: figure.value for figure in figures}
    marks = {"return/random_policy": ("random policy", ":"), "return/last_trial": ("last trial", "--")}
    returns = record.data_returns
    described = f"{len(returns)} trajectories from {returns.min():.4g} to {returns.max():.4g}"
    with chart(parts, f"Histogram of the training returns of {run}: {described}") as axes:
        draw_data_returns(axes, returns, record.data_algorithms)
        for name, (label, line) in marks.items():
            if name in named:
                axes.axvline(named[name], color=INK, linestyle=line, label=f"{label}, {named[name]:.4g}")
        legend(axes)
    return parts[0]


def attention_chart(attention: TrialAttention, first_trial: int, run: str) -> str:
    """Bars of the mean attention of each trial's actions to each trial, above those of uniform attention."""
    names = source_names(attention, first_trial)
    trials = np.unique(attention.trajectory)
    rows = []
    for trial in trials:
        chosen = attention.trajectory == trial
        rows.append(grouped(attention.shares[:, :, chosen].mean(axis=(0, 1, 2)), first_trial))
        rows.append(grouped(attention.even[chosen].mean(axis=0), first_trial))
    shares = np.array(rows)  # [2 trials, sources]
    places = np.concatenate([[2.6 * row, 2.6 * row + 0.95] for row in range(len(trials))])
    heights = np.tile([1.1, 0.55], len(trials))
    parts: list[str] = []
    described = "; ".join(
        f"trial {index + 1}: "
        + ", ".join(f"{name} {share:.0%}" for name, share in zip(names, row, strict=True) if share)
        for index, row in enumerate(shares[::2])
    )
    with chart(
        parts, f"Attention of the actions of each trial of {run}. {described}", 90 + 40 * len(trials)
    ) as axes:
        start = np.zeros(len(shares))
        for index, name in enumerate(names):
            colour = _source_colour(index, first_trial)
            bars = axes.barh(places, shares[:, index], heights, left=start, color=colour, label=name)
            for bar, faint in zip(bars, np.arange(len(shares)) % 2, strict=True):
                bar.set_alpha(0.45 if faint else 1.0)
            start += shares[:, index]
        axes.set_yticks(places[::2], [f"trial {index + 1}" for index in range(len(trials))])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("share of attention; thin bars: uniform attention")
        legend(axes, columns=min(len(names), 4))
    return parts[0]


def attention_course(attention: TrialAttention, first_trial: int, run: str) -> str:
    """Stacked attention shares of the last trial over its decisions."""
    names = source_names(attention, first_trial)
    chosen = attention.trajectory == attention.trajectory.max()
    shares = attention.shares[:, :, chosen].mean(axis=(0, 1))
    stacked = np.stack([grouped(row, first_trial) for row in shares], axis=1)
    parts: list[str] = []
    with chart(parts, f"Attention of the last trial of {run} over its decisions, by trial") as axes:
        colours = [_source_colour(index, first_trial) for index in range(len(names))]
        axes.stackplot(attention.timestep[chosen], stacked, colors=colours, labels=names)
        axes.set_xlim(attention.timestep[chosen].min(), attention.timestep[chosen].max())
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("decision of the last trial")
        axes.set_ylabel("share of attention")
        legend(axes, columns=min(len(names), 4))
    return parts[0]


def source_names(attention: TrialAttention, first_trial: int) -> list[str]:
    """What an action can attend to: the prompt, if there was one, and each trial."""
    prompt = ["prompt"] if first_trial else []
    return prompt + [f"trial {number + 1}" for number in range(attention.even.shape[1] - first_trial)]


def grouped(shares: np.ndarray, first_trial: int) -> np.ndarray:
    """Shares [J] with the prompt's trajectories summed into one."""
    if not first_trial:
        return shares
    return np.concatenate([[shares[:first_trial].sum()], shares[first_trial:]])


def _source_colour(index: int, first_trial: int) -> str:
    if first_trial and index == 0:
        return GREY
    return PALETTE[(index - bool(first_trial)) % len(PALETTE)]


def legend(axes: Axes, columns: int = 2) -> None:
    """Adds a legend below the chart."""
    axes.figure.legend(loc="outside lower center", ncols=columns, handlelength=1.8, columnspacing=1.2)
