"""The chart of the return per trial in a report, with its references and controls."""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import Figure
from evals.plots import GREY, PALETTE, draw_intervals
from evals.report_page.charts import INK, chart, legend

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


Curve = list[tuple[int, Figure]]
"""(number of the trial, figure) of each trial of a curve, in order."""


def trial_curves(figures: Sequence[Figure]) -> dict[str, Curve]:
    """Selects the figures of trials, by curve; the model's own curve comes first.

    ``return/trial_2`` belongs to the curve ``return``, ``return/control/shuffled/trial_2`` to
    ``return/control/shuffled``.
    """
    curves: dict[str, Curve] = {}
    for figure in figures:
        match = _TRIAL.fullmatch(figure.name)
        if match:
            curves.setdefault(match["curve"], []).append((int(match["number"]), figure))
    ordered = sorted(curves, key=lambda curve: curve != MODEL_CURVE)
    return {curve: sorted(curves[curve], key=lambda point: point[0]) for curve in ordered}


def curve_label(curve: str) -> str:
    """``return/control/other_task`` -> ``control: other task``."""
    if curve == MODEL_CURVE:
        return "the model"
    return curve.partition("/")[2].replace("/", ": ").replace("_", " ")


def trials_chart(figures: Sequence[Figure], run: str, top: float | None = None) -> str | None:
    """Chart of the return of each trial with all intervals; None if there are no trials.

    Args:
      figures: figures of the run.
      run: name of the run.
      top: highest return on the axis when several runs are compared; None fits the axis to this run.
    """
    curves = trial_curves(figures)
    if not curves:
        return None
    named = {figure.name: figure for figure in figures}
    references = {name: style for name, style in REFERENCES.items() if name in named}
    parts: list[str] = []
    described = "; ".join(
        f"{curve_label(name)}: {', '.join(f'{figure.value:.4g}' for _, figure in points)}"
        for name, points in curves.items()
    )
    height = 225 + 8 * (len(curves) + len(references))
    with chart(parts, f"Return of each trial of {run}. {described}", height) as axes:
        _draw_curves(axes, curves)
        for name, (label, colour, line) in references.items():
            value = named[name].value
            axes.axhline(value, color=colour, linestyle=line, linewidth=1.3, label=f"{label}, {value:.4g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("trial")
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), high if top is None else 1.05 * top)
        unit = next(iter(curves.values()))[0][1].unit
        axes.set_ylabel(f"mean {unit}; bars: 95%")
        legend(axes)
    return parts[0]


def _draw_curves(axes: Axes, curves: dict[str, Curve]) -> None:
    for index, (name, points) in enumerate(curves.items()):
        intervals = [_interval(figure) for _, figure in points]
        main = index == 0
        # Curves are shifted slightly so that no interval hides another.
        numbers = np.array([number for number, _ in points]) + 0.06 * index
        draw_intervals(
            axes,
            numbers,
            intervals,
            color=PALETTE[index % len(PALETTE)],
            linestyle=_STYLES[index // len(PALETTE) % len(_STYLES)],
            marker="o",
            markersize=5 if main else 3.5,
            linewidth=2 if main else 1.2,
            capsize=3,
            label=curve_label(name),
            zorder=3 if main else 2,
        )


def _interval(figure: Figure) -> Interval:
    return Interval(figure.value, figure.low, figure.high, figure.n)
