"""Line retrieval accuracy against context length, beside the paper's four curves (Figure 3).

    python experiments/figure3_line_retrieval.py runs/line_retrieval-*/results.json

The runs are those of evals/line_retrieval.py. The paper's curves are read off its plot, to about a tenth.
Models that were trained on line retrieval itself have a style of their own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import rich
import tyro

from agentic_ring.errors import DataError
from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import read_results
from agentic_ring.terminal import cli
from agentic_ring.terminal.tables import TextTable
from evals.plots import BLUE, GREEN, GREY, ORANGE, PINK, draw_intervals, legend_below, save, titled_canvas
from evals.retrieval.reports import accuracy_axes
from experiments.paper import RetrievalCurve, retrieval_curves

PAPER_STYLES = (("v", ":"), ("^", "-."), ("D", "--"), ("s", "-"))
OWN_COLOURS = (BLUE, ORANGE, GREEN, PINK)


class RunCurve(NamedTuple):
    """The accuracies of one run, whose label notes if the model was trained on line retrieval itself.

    Each point is a set of cases such as ``4k``, its tokens per prompt and its accuracy, in ascending length.
    """

    label: str
    trained_on_task: bool
    points: list[tuple[str, float, Interval]]


def read_curve(path: Path) -> RunCurve:
    """Reads the curve of a run's ``results.json``; a ``DataError`` if it is not that of line retrieval."""
    results = read_results(path)
    points = []
    for figure in results.figures:
        if figure.name.startswith("accuracy/"):
            name = figure.name.removeprefix("accuracy/")
            accuracy = Interval(figure.value, figure.low, figure.high, figure.n, "answers")
            points.append((name, results.figure(f"prompt_tokens/{name}").value, accuracy))
    reader, trained = results.config.get("reader"), results.config.get("trained_on_task")
    if not points or not isinstance(reader, str) or not isinstance(trained, bool):
        raise DataError(f"{path} has no accuracies of line retrieval; give one of evals/line_retrieval.py")
    label = f"{reader} (trained on the task)" if trained else reader
    return RunCurve(label, trained, sorted(points, key=lambda point: point[1]))


def plot_curves(path: Path, runs: Sequence[RunCurve], paper: Sequence[RetrievalCurve]) -> None:
    """Plots the runs in colours, those trained on the task dashed and hollow, and the paper's in grey."""
    canvas, axes = titled_canvas("line retrieval (Figure 3)")
    for curve, (marker, line) in zip(paper, PAPER_STYLES, strict=True):
        contexts, low, high = zip(*curve.points, strict=True)
        style = {"color": GREY, "marker": marker, "linestyle": line, "markersize": 5, "linewidth": 1.2}
        axes.plot(contexts, low, **style, label=f"paper: {curve.model}")
        if low != high:
            axes.fill_between(contexts, low, high, color=GREY, alpha=0.15, linewidth=0)
    for index, run in enumerate(runs):
        colour = OWN_COLOURS[index % len(OWN_COLOURS)]
        fill, line = ("white", "--") if run.trained_on_task else (colour, "-")
        style = {"color": colour, "marker": "o", "mfc": fill, "linestyle": line, "capsize": 4, "linewidth": 2}
        _, tokens, accuracies = zip(*run.points, strict=True)
        draw_intervals(axes, tokens, accuracies, label=run.label, **style)
    contexts = [context for curve in paper for context, *_ in curve.points]
    accuracy_axes(axes, [*contexts, *(tokens for run in runs for _, tokens, _ in run.points)])
    axes.set_ylabel("accuracy; bars: 95% over questions")
    legend_below(canvas, axes)
    save(canvas, path)


def main(
    results: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output: Path = Path("runs/figure3_line_retrieval.png"),
) -> None:
    """Draws runs of evals/line_retrieval.py beside the paper's Figure 3.

    Args:
      results: The results.json of one or more runs.
      output: PNG file to write.
    """
    runs = [read_curve(path) for path in results]
    curves = retrieval_curves()
    plot_curves(output, runs, curves)
    rows = [
        {
            "model": run.label,
            "cases": name,
            "tokens": f"{tokens:,.0f}",
            "right (95%)": f"{accuracy:.3f}",
            "n": str(accuracy.n),
        }
        for run in runs
        for name, tokens, accuracy in run.points
    ]
    rich.print(TextTable("line retrieval", rows).rich())
    for curve in curves:
        print(f"paper, {curve.model}: {curve.note}")
    print(f"written to {output}")


if __name__ == "__main__":
    cli.run(main)
