"""Charts of an in-context run: returns of all arms, regret, controls, and attention by cue and by pay."""

import numpy as np
from matplotlib.ticker import PercentFormatter

from evals.in_context.learning_curves import PLOTS
from evals.in_context.recorded_trials import GROUPS, RecordedTrials
from evals.in_context.verdict import Returns
from evals.plots import BLUE, GREEN, GREY, ORANGE, PINK
from evals.report_page.charts import chart, legend

_COLOURS = (GREEN, BLUE, ORANGE, PINK, GREY)
_SAME_CUE = [index for index, group in enumerate(GROUPS) if group.startswith("same cue")]


def return_charts(returns: Returns, run: str) -> list[tuple[str, str]]:
    """(chart, caption) of every plot of the returns."""
    charts = []
    for plot in PLOTS.values():
        parts: list[str] = []
        described = f"{plot.title[0].upper()}{plot.title[1:]}"
        # The height of the legend is known only when all curves are drawn.
        with chart(parts, f"{described}, {run}") as axes:
            plot.draw(axes, returns)
            lines = len(axes.get_legend_handles_labels()[1])
            axes.figure.set(figheight=(230 + 14 * lines) / 72)
            if lines:
                legend(axes, columns=1)
        charts.append((parts[0], f"{described}."))
    return charts


def cue_attention_chart(recorded: RecordedTrials, run: str) -> str:
    """Bars of the attention of each layer and head to groups of trials, above uniform attention."""
    shares = recorded.attention.mean(axis=0)
    layers, heads, _ = shares.shape
    names = [f"layer {layer + 1}, head {head + 1}" for layer in range(layers) for head in range(heads)]
    rows = np.concatenate([shares.reshape(layers * heads, -1), recorded.even.mean(axis=0)[None]])
    names.append("uniform attention")
    described = "; ".join(
        f"{name}: " + ", ".join(f"{group} {share:.0%}" for group, share in zip(GROUPS, row, strict=True))
        for name, row in zip(names, rows, strict=True)
    )
    parts: list[str] = []
    with chart(parts, f"Attention of {run} by cue and by pay. {described}", 130 + 24 * len(rows)) as axes:
        start = np.zeros(len(rows))
        for group, colour, share in zip(GROUPS, _COLOURS, rows.T, strict=True):
            axes.barh(names, share, left=start, color=colour, label=group)
            start += share
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("share of attention")
        legend(axes)
    return parts[0]


def same_cue_shares(recorded: RecordedTrials) -> tuple[np.ndarray, float]:
    """Shares [layers, heads] of attention on earlier trials of the same cue, and under uniform attention."""
    shares = recorded.attention.mean(axis=0)[..., _SAME_CUE].sum(axis=-1)
    return shares, float(recorded.even.mean(axis=0)[_SAME_CUE].sum())
