"""Charts of a report as inline ``<svg>`` elements: returns of the trials and of the data, loss, attention."""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, PercentFormatter

from agentic_ring.results.results_file import Figure
from agentic_ring.rollouts.returns import EvaluationRecord
from evals import plots
from evals.plots import GREY, PALETTE, draw_data_returns, draw_intervals, draw_loss
from evals.plots.told_returns import draw_contexts
from evals.report_page.run_data import TrialAttention

# In points, which the page scales to its column. A phone is this narrow, so 9-point text stays readable.
WIDTH, HEIGHT = 370, 250
INK = "#000000"
VARIABLES = {INK: "--ink"} | {
    getattr(plots, name.upper()): f"--{name}"
    for name in ("blue", "orange", "green", "pink", "sky", "vermilion", "grey")
}
"""CSS variable of the page for each colour of the charts."""
STYLED = matplotlib.rc_context(
    {
        "svg.fonttype": "none",
        "font.size": 9.5,
        "legend.fontsize": 9,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
)
"""Decorator of the functions that draw."""
MODEL_CURVE = "return"
REFERENCES = {
    "return/data_best": ("best of the data", INK, "--"),
    "return/data_p95": ("95th percentile of the data", INK, "-."),
    "return/target": ("target", INK, (0, (1, 3))),
    "cloned": ("trained on this task alone", INK, (0, (1, 3))),
    "return/data_median": ("median of the data", GREY, "-."),
    "return/random_policy": ("random policy", GREY, ":"),
}
"""Label, colour and line style of the reference values among the returns of the model."""
Curve = list[tuple[int, Figure]]
"""(number of the trial, figure) of each trial of a curve, in order."""


def _canvas(height: int = HEIGHT) -> tuple[Canvas, Axes]:
    """A canvas of ``height`` points, and its axes."""
    canvas = Canvas(figsize=(WIDTH / 72, height / 72), layout="constrained")
    return canvas, canvas.add_subplot()


def _svg(canvas: Canvas, description: str, columns: int = 2) -> str:
    """The canvas as an ``<svg>`` element, with a legend of ``columns`` below it.

    ``description`` is the chart in words, for screen readers.
    """
    canvas.legend(loc="outside lower center", ncols=columns, handlelength=1.8, columnspacing=1.2)
    buffer = io.StringIO()
    # The salt makes the ids of markers and clip paths differ from those of the page's other charts.
    with matplotlib.rc_context({"svg.hashsalt": description}):
        canvas.savefig(buffer, format="svg", transparent=True)
    # The element only, without prologue, metadata, fixed size and colours. matplotlib numbers the groups, so
    # that two charts would share their ids.
    tag, _, drawn = buffer.getvalue().partition("<svg")[2].partition(">")
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)
    view_box = re.findall(r'viewBox="[^"]*"', tag)[0]
    svg = f'<svg class="chart" {view_box} role="img" aria-label="{escape(description)}">{drawn}'
    for colour, variable in VARIABLES.items():
        svg = re.sub(colour, f"var({variable})", svg, flags=re.IGNORECASE)
    return svg


@STYLED
def loss_chart(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Chart of the training losses of all runs, by name; None if no run has any."""
    if not metrics:
        return None
    canvas, axes = _canvas(225 + 12 * len(metrics))
    for index, (run, rows) in enumerate(metrics.items()):
        draw_loss(axes, rows, PALETTE[index % len(PALETTE)], run if len(metrics) > 1 else "")
    axes.set_ylabel("loss")
    if all(row["loss"] > 0 for rows in metrics.values() for row in rows):
        axes.set_yscale("log")
    finals = "; ".join(f"{run} ends at {rows[-1]['loss']:.4g}" for run, rows in metrics.items())
    return _svg(canvas, f"Training loss over optimiser steps. {finals}")


@STYLED
def data_chart(record: EvaluationRecord, figures: Sequence[Figure], run: str) -> str:
    """Histogram of the training returns by collecting algorithm, with the run's own returns marked."""
    named = {figure.name: figure.value for figure in figures}
    marks = {"return/random_policy": ("random policy", ":"), "return/last_trial": ("last trial", "--")}
    if told := told_figures(figures):
        marks[f"return/n{max(told)}"] = (f"after {max(told)} stored", "--")
    returns = record.data_returns
    canvas, axes = _canvas()
    draw_data_returns(axes, returns, record.data_algorithms)
    for name, (label, line) in marks.items():
        if name in named:
            axes.axvline(named[name], color=INK, linestyle=line, label=f"{label}, {named[name]:.4g}")
    described = f"{len(returns)} trajectories from {returns.min():.4g} to {returns.max():.4g}"
    return _svg(canvas, f"Histogram of the training returns of {run}: {described}")


def trial_curves(figures: Sequence[Figure]) -> dict[str, Curve]:
    """Selects the figures of trials, by curve; the model's own curve comes first.

    ``return/trial_2`` belongs to the curve ``return``, ``return/control/shuffled/trial_2`` to
    ``return/control/shuffled``.
    """
    curves: dict[str, Curve] = {}
    for figure in figures:
        match = re.fullmatch(r"(.+)/trial_(\d+)", figure.name)
        if match:
            curves.setdefault(match[1], []).append((int(match[2]), figure))
    ordered = sorted(curves, key=lambda curve: curve != MODEL_CURVE)
    return {curve: sorted(curves[curve], key=lambda point: point[0]) for curve in ordered}


def curve_label(curve: str) -> str:
    """``return/control/other_task`` -> ``control: other task``."""
    if curve == MODEL_CURVE:
        return "the model"
    if curve == "own_trials":
        return "nothing stored"
    if curve.startswith("behind_"):
        return f"after {curve.removeprefix('behind_')} stored"
    return curve.partition("/")[2].replace("/", ": ").replace("_", " ")


def told_figures(figures: Sequence[Figure]) -> dict[int, Figure]:
    """Returns by the number of stored trajectories that tell the task, such as ``return/n128``."""
    found = ((re.fullmatch(r"return/n(\d+)", figure.name), figure) for figure in figures)
    return {int(match[1]): figure for match, figure in found if match}


@STYLED
def contexts_chart(figures: Sequence[Figure], run: str, top: float | None = None) -> str | None:
    """Chart of ``told_figures`` with the controls and references; None without them; ``top`` is as below."""
    told = told_figures(figures)
    if not told:
        return None
    controls = {x.name.removeprefix("control/"): x for x in figures if x.name.startswith("control/")}
    canvas, axes = _canvas(270)
    draw_contexts(axes, told, controls)
    _draw_references(axes, figures, top)
    described = ", ".join(
        f"{name}: {figure.value:.4g}" for name, figure in [*told.items(), *controls.items()]
    )
    return _svg(canvas, f"Return of {run} by the number of stored trajectories. {described}")


def _draw_references(axes: Axes, figures: Sequence[Figure], top: float | None) -> None:
    """Draws the references among returns, and the axis of returns from 0 to ``top``, or to what there is."""
    named = {figure.name: figure.value for figure in figures}
    for name, (label, colour, line) in REFERENCES.items():
        if name in named:
            label = f"{label}, {named[name]:.4g}"
            axes.axhline(named[name], color=colour, linestyle=line, linewidth=1.3, label=label)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), high if top is None else 1.05 * top)
    axes.set_ylabel("mean return\nbars: 95% over environments")


@STYLED
def trials_chart(figures: Sequence[Figure], run: str, top: float | None = None) -> str | None:
    """Chart of the return of each trial with all intervals, references and controls; None without trials.

    ``top`` is the highest return on the axis when several runs are compared; None fits the axis to this run.
    """
    curves = trial_curves(figures)
    if not curves:
        return None
    references = sum(figure.name in REFERENCES for figure in figures)
    canvas, axes = _canvas(225 + 8 * (len(curves) + references))
    for index, (name, points) in enumerate(curves.items()):
        main = {"markersize": 5, "linewidth": 2, "zorder": 3}
        draw_intervals(
            axes,
            # Curves are shifted slightly so that no interval hides another.
            np.array([number for number, _ in points]) + 0.06 * index,
            [figure for _, figure in points],
            color=PALETTE[index % len(PALETTE)],
            linestyle=("-", "--", "-.", ":")[index // len(PALETTE) % 4],
            marker="o",
            capsize=3,
            label=curve_label(name),
            **(main if index == 0 else {"markersize": 3.5, "linewidth": 1.2, "zorder": 2}),
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    _draw_references(axes, figures, top)
    described = "; ".join(
        f"{curve_label(name)}: {', '.join(f'{figure.value:.4g}' for _, figure in points)}"
        for name, points in curves.items()
    )
    return _svg(canvas, f"Return of each trial of {run}. {described}")


@STYLED
def attention_chart(attention: TrialAttention, first_trial: int, run: str) -> str:
    """Bars of the mean attention of each trial's actions to each trial, above those of uniform attention."""
    sources = _sources(attention, first_trial)
    trials = np.unique(attention.trajectory)
    rows = []
    for trial in trials:
        chosen = attention.trajectory == trial
        rows += [attention.shares[:, :, chosen].mean(axis=(0, 1, 2)), attention.even[chosen].mean(axis=0)]
    shares = _grouped(np.array(rows), first_trial)  # [2 trials, sources]
    places = np.concatenate([[2.6 * row, 2.6 * row + 0.95] for row in range(len(trials))])
    heights = np.tile([1.1, 0.55], len(trials))
    canvas, axes = _canvas(90 + 40 * len(trials))
    start = np.zeros(len(shares))
    for index, (name, colour) in enumerate(sources.items()):
        bars = axes.barh(places, shares[:, index], heights, left=start, color=colour, label=name)
        for faint in bars[1::2]:
            faint.set_alpha(0.45)
        start += shares[:, index]
    axes.set_yticks(places[::2], [f"trial {index + 1}" for index in range(len(trials))])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of attention; thin bars: uniform attention")
    described = "; ".join(
        f"trial {index + 1}: "
        + ", ".join(f"{name} {share:.0%}" for name, share in zip(sources, row, strict=True) if share)
        for index, row in enumerate(shares[::2])
    )
    described = f"Attention of the actions of each trial of {run}. {described}"
    return _svg(canvas, described, min(len(sources), 4))


@STYLED
def attention_course(attention: TrialAttention, first_trial: int, run: str) -> str:
    """Stacked attention shares of the last trial over its decisions."""
    sources = _sources(attention, first_trial)
    chosen = attention.trajectory == attention.trajectory.max()
    shares = _grouped(attention.shares[:, :, chosen].mean(axis=(0, 1)), first_trial)
    canvas, axes = _canvas()
    timesteps = attention.timestep[chosen]
    axes.stackplot(timesteps, shares.T, colors=list(sources.values()), labels=list(sources))
    axes.set_xlim(timesteps.min(), timesteps.max())
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("decision of the last trial")
    axes.set_ylabel("share of attention")
    described = f"Attention of the last trial of {run} over its decisions, by trial"
    return _svg(canvas, described, min(len(sources), 4))


def _sources(attention: TrialAttention, first_trial: int) -> dict[str, str]:
    """What an action can attend to, with its colour: the prompt, if there was one, and each trial."""
    trials = range(attention.even.shape[1] - first_trial)
    prompt = {"prompt": GREY} if first_trial else {}
    return prompt | {f"trial {number + 1}": PALETTE[number % len(PALETTE)] for number in trials}


def _grouped(shares: np.ndarray, first_trial: int) -> np.ndarray:
    """Shares [..., J] with those of the prompt's trajectories summed into one."""
    prompt = [shares[..., :first_trial].sum(axis=-1, keepdims=True)] if first_trial else []
    return np.concatenate([*prompt, shares[..., first_trial:]], axis=-1)
