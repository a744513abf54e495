"""Plot of the return per trial in hidden tasks, with all controls."""

from pathlib import Path

from matplotlib.figure import Figure as Canvas

from evals.common.plots import BLUE, GREEN, GREY, ORANGE, PINK, error_bars, save
from evals.in_context.task_rollouts import CONTEXTS
from evals.in_context.verdict import BEST_OF_NO_CONTEXT, BEST_ONLINE, TaskFamilyReport

_CURVES = {"online": BLUE, "no_context": GREY}
_COLOURS = {
    BEST_ONLINE: BLUE,
    BEST_OF_NO_CONTEXT: GREY,
    "right": GREEN,
    "wrong": PINK,
    "zeroed": ORANGE,
    "shuffled": "#56B4E9",
    "descending": "#D55E00",
}
LABELS = {
    "online": "online, all trials in context",
    "no_context": "no context",
    BEST_ONLINE: "best trial online",
    BEST_OF_NO_CONTEXT: "best trial without context",
    "right": "stored: right task",
    "wrong": "stored: another task",
    "zeroed": "stored: rewards zeroed",
    "shuffled": "stored: steps shuffled",
    "descending": "stored: descending",
}
"""Label of each condition in plots."""


def plot_task_family(path: Path, title: str, report: TaskFamilyReport) -> None:
    """Draws a panel for each task and one for all pooled: trials as curves, single trials as points.

    Args:
      path: PNG file to write.
      title: title of the figure, such as the domain.
      report: returns of all conditions.
    """
    tasks = report.tasks
    canvas = Canvas(figsize=(3.6 * len(tasks), 4.6), layout="constrained")
    panels = canvas.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        found = report.intervals(task)
        trials = len(found["online"])
        for name, colour in _CURVES.items():
            values = [interval.value for interval in found[name]]
            axes.errorbar(
                range(1, trials + 1),
                values,
                yerr=error_bars(found[name]),
                color=colour,
                marker="o",
                capsize=3,
                label=LABELS[name],
            )
        for place, name in enumerate((BEST_ONLINE, BEST_OF_NO_CONTEXT, *CONTEXTS), start=trials + 1):
            axes.errorbar(
                [place],
                [found[name][0].value],
                yerr=error_bars(found[name][:1]),
                color=_COLOURS[name],
                marker="s",
                capsize=3,
                linestyle="none",
                label=LABELS[name],
            )
        axes.set_title(task.replace("_", " "), loc="left", fontweight="bold")
        axes.set_xticks(range(1, trials + 1))
        axes.set_xlabel("trial")
        axes.set_ylabel("share of the target" if report.unit(task) == "target" else "mean return")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    canvas.suptitle(title, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(canvas, path)
