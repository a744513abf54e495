"""Charts of the return per trial in a report: one for each task, with its references and controls."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from evals.common.intervals import Interval
from evals.common.plots import GREY, error_bars
from evals.common.results import Figure
from evals.in_context.trial_curves import LABELS
from evals.report_page.charts import COLOURS, INK, chart, legend

_STYLES = ("-", "--", "-.", ":")
_TRIAL = re.compile(r"(?P<curve>.+)/trial_(?P<number>\d+)")
MODEL_CURVE = "return"
REFERENCES = {
    "return/data_best": ("best of the data", INK, "--"),
    "return/target": ("target", INK, (0, (1, 3))),
    "return/data_median": ("median of the data", GREY, "-."),
    "return/random_policy": ("random policy", GREY, ":"),
}
"""Label, colour and line style of the reference values."""


@dataclass(frozen=True)
class TaskTrials:
    """The trials in one task.

    Attributes:
      name: prefix of the figures' names: the task, or ``return`` if there is only one task.
      curves: (number of the trial, figure) of every curve, in order; the model's own curve comes first.
      points: figures of a single trial, such as a control.
    """

    name: str
    curves: dict[str, list[tuple[int, Figure]]]
    points: dict[str, Figure]


def trials_of_tasks(figures: Sequence[Figure]) -> list[TaskTrials]:
    """Selects the figures of trials, by task.

    ``return/trial_2`` belongs to the curve ``return``, ``return/control/shuffled/trial_2`` to
    ``return/control/shuffled``; ``run/right`` is a point of the task ``run``, whose curve is ``run/online``.
    """
    curves: dict[str, dict[str, list[tuple[int, Figure]]]] = {}
    for figure in figures:
        match = _TRIAL.fullmatch(figure.name)
        if match:
            task_curves = curves.setdefault(match["curve"].split("/")[0], {})
            task_curves.setdefault(match["curve"], []).append((int(match["number"]), figure))
    tasks = []
    for name, found in curves.items():
        ordered = sorted(found, key=lambda curve: curve != MODEL_CURVE)
        unit = found[ordered[0]][0][1].unit
        points = {
            figure.name: figure
            for figure in figures
            if figure.name.startswith(f"{name}/")
            and figure.unit == unit
            and not _TRIAL.fullmatch(figure.name)
        }
        in_order = {curve: sorted(found[curve], key=lambda point: point[0]) for curve in ordered}
        tasks.append(TaskTrials(name, in_order, {} if name == MODEL_CURVE else points))
    return tasks


def curve_label(curve: str) -> str:
    """``return/control/other_task`` -> ``control: other task``; hidden tasks have labels of their own."""
    if curve == MODEL_CURVE:
        return "the model"
    rest = curve.partition("/")[2]
    return LABELS.get(rest, rest.replace("/", ": ").replace("_", " "))


def trials_charts(figures: Sequence[Figure], run: str, top: float | None = None) -> list[tuple[str, str]]:
    """(caption, chart) of each task, with all intervals.

    Args:
      figures: figures of the run.
      run: name of the run.
      top: highest return on the axis when several runs are compared; None fits the axis to this run.
    """
    charts = []
    for task in trials_of_tasks(figures):
        caption = "Mean return of each trial; all earlier trials are in the context."
        if task.name != MODEL_CURVE:
            caption = f"{task.name.replace('_', ' ').capitalize()}: trials, and controls of a single trial."
        charts.append((caption, _chart(task, figures, run, top)))
    return charts


def _chart(task: TaskTrials, figures: Sequence[Figure], run: str, top: float | None) -> str:
    named = {figure.name: figure for figure in figures}
    references = {
        name: style for name, style in REFERENCES.items() if name in named and MODEL_CURVE in task.curves
    }
    parts: list[str] = []
    described = "; ".join(
        f"{curve_label(name)}: {', '.join(f'{figure.value:.4g}' for figure in shown)}"
        for name, shown in (
            *((name, [figure for _, figure in points]) for name, points in task.curves.items()),
            *((name, [figure]) for name, figure in task.points.items()),
        )
    )
    height = 225 + 8 * (len(task.curves) + len(references)) + (75 if task.points else 0)
    with chart(parts, f"Return of each trial of {run}, {task.name}. {described}", height) as axes:
        _draw_curves(axes, task)
        for name, (label, colour, line) in references.items():
            value = named[name].value
            axes.axhline(value, color=colour, linestyle=line, linewidth=1.3, label=f"{label}, {value:.4g}")
        if task.points:
            _draw_points(axes, task)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel("trial")
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), 1.05 * top if top is not None and MODEL_CURVE in task.curves else high)
        unit = next(iter(task.curves.values()))[0][1].unit
        axes.set_ylabel(f"{'share of the target' if unit == 'target' else f'mean {unit}'}; bars: 95%")
        legend(axes)
    return parts[0]


def _draw_curves(axes: Axes, task: TaskTrials) -> None:
    for index, (name, points) in enumerate(task.curves.items()):
        intervals = [_interval(figure) for _, figure in points]
        main = index == 0
        # Curves are shifted slightly so that no interval hides another.
        numbers = np.array([number for number, _ in points]) + 0.06 * index
        axes.errorbar(
            numbers,
            [interval.value for interval in intervals],
            yerr=error_bars(intervals),
            color=COLOURS[index % len(COLOURS)],
            linestyle=_STYLES[index // len(COLOURS) % len(_STYLES)],
            marker="o",
            markersize=5 if main else 3.5,
            linewidth=2 if main else 1.2,
            capsize=3,
            label=curve_label(name),
            zorder=3 if main else 2,
        )


def _draw_points(axes: Axes, task: TaskTrials) -> None:
    """Draws the single trials to the right of the curves, with their names on the axis."""
    trials = max(number for points in task.curves.values() for number, _ in points)
    places = range(trials + 1, trials + 1 + len(task.points))
    intervals = [_interval(figure) for figure in task.points.values()]
    axes.errorbar(
        places,
        [interval.value for interval in intervals],
        yerr=error_bars(intervals),
        color=INK,
        marker="s",
        markersize=4,
        linestyle="none",
        capsize=3,
    )
    names = [curve_label(name) for name in task.points]
    axes.set_xticks(
        [*range(1, trials + 1), *places],
        [*(f"trial {n}" for n in range(1, trials + 1)), *names],
        rotation=45,
        ha="right",
        rotation_mode="anchor",
    )


def _interval(figure: Figure) -> Interval:
    return Interval(figure.value, figure.low, figure.high, figure.n)
