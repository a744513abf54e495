"""Table 5 from its cells: returns, order of the methods, learning curves; text, CSV, Markdown and plots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from agentic_ring.data.store import TARGET_QUANTILE
from agentic_ring.files.atomic import replacing
from agentic_ring.results.intervals import (
    Interval,
    improvement_interval,
    interquartile_mean_interval,
    mean_interval,
)
from agentic_ring.results.results_file import Results
from agentic_ring.results.rows import origin_columns, write_rows
from agentic_ring.terminal.tables import TextTable
from evals.plots import BLUE, GREY, ORANGE, PALETTE, draw_intervals, legend_below, save, titled_canvas
from experiments import paper
from experiments.table5.cells import CURVE, TableCell
from experiments.table5.methods import AGENTIC, METHODS

RANDOM, LAST = "random", "return/last_trial"
FORMULA = "100 * (R - random) / (reference - random)"
ACROSS = 4
"""Panels beside each other."""
REFERENCE = f"{100 * TARGET_QUANTILE:.0f}th percentile of the training returns"


@dataclass(frozen=True)
class ReturnsTable:
    """The results of each cell of some tasks, methods and seeds, including the random policy's."""

    tasks: Sequence[str]
    methods: Sequence[str]
    seeds: int
    results: Mapping[TableCell, Results]

    def returns(self, method: str, figure: str) -> np.ndarray:
        """A figure's value, such as return/last_trial, in each cell of a method: [seeds, tasks]."""
        return self._each(method, lambda results: results.figure(figure).value)

    def _each(self, method: str, value: Callable[[Results], float]) -> np.ndarray:
        cells = [[TableCell(task, method, seed) for task in self.tasks] for seed in range(self.seeds)]
        return np.array([[value(self.results[cell]) for cell in row] for row in cells])

    @cached_property
    def random(self) -> np.ndarray:
        """Mean return of uniform random actions, [tasks]: the 0 of normalised returns."""
        figures = self.results[TableCell(self.tasks[0], RANDOM, 0)].figures
        trials = [figure.name for figure in figures if figure.name.startswith("return/trial_")]
        return np.mean([self.returns(RANDOM, name) for name in trials], axis=(0, 1))

    @cached_property
    def reference(self) -> np.ndarray:
        """Return that every trial aims at, by the data of each seed, [seeds, tasks]: a normalised 100."""
        return self._each(RANDOM, lambda results: results.config["data"]["target"])

    def normalised(self, returns: np.ndarray) -> np.ndarray:
        """Returns [seeds, tasks] between the random policy, 0, and the reference, 100."""
        return 100 * (returns - self.random) / (self.reference - self.random)

    def scores(self, method: str) -> np.ndarray:
        """Normalised returns of the last trial, [seeds, tasks]."""
        return self.normalised(self.returns(method, LAST))

    def learning_curve(self, method: str) -> tuple[list[float], list[np.ndarray]]:
        """Shares of the updates, ascending, and the ``scores`` of the method after each."""
        figures = self.results[TableCell(self.tasks[0], method, 0)].figures
        shares = [f.name.removeprefix(CURVE) for f in figures if f.name.startswith(CURVE)]
        scores = [self.normalised(self.returns(method, f"{CURVE}{share}")) for share in shares]
        return [float(share) for share in shares], scores

    @cached_property
    def order(self) -> list[tuple[str, Interval]]:
        """Methods by the interquartile mean of their scores over tasks and seeds, best first."""
        means = [(method, interquartile_mean_interval(self.scores(method))) for method in self.methods]
        return sorted(means, key=lambda pair: -pair[1].value)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the CSV: one per task, method, seed and trial, and one for the best of the trials."""
        return [
            {
                "task": cell.task,
                "method": cell.method,
                "trajectories": METHODS[cell.method].trajectories,
                "seed": cell.seed,
                "trial": figure.name.removeprefix("return/").removeprefix("trial_"),
                "return": figure.value,
                "low": figure.low,
                "high": figure.high,
                "environments": figure.n,
                "normalised": self.normalised(self.returns(cell.method, figure.name))[cell.seed, column],
                "random": self.random[column],
                "reference": self.reference[cell.seed, column],
                **origin_columns(vars(results)),
            }
            for cell, results in self.results.items()
            for column in [self.tasks.index(cell.task)]
            for figure in results.figures
            if figure.name.startswith("return/") and figure.name != LAST
        ]


def write_table(
    folder: Path, table: ReturnsTable, memory: Mapping[str, str], hardware: str
) -> list[TextTable]:
    """Writes table.csv and table.md, and returns the tables for a terminal.

    The table of memory is left out where ``memory`` is empty: no compiler was asked.
    """
    write_rows(folder / "table.csv", table.rows())
    tables = [_normalised_table(table), _returns_table(table), _order_table(table)]
    tables += [_memory_table(memory, hardware)] if memory else []
    with replacing(folder / "table.md") as beside:
        beside.write_text("\n".join(each.markdown() for each in tables))
    return tables


def plot_returns(path: Path, table: ReturnsTable) -> None:
    """Plots the interquartile mean of each method's normalised last trials; dots are tasks and seeds."""
    canvas, axes = titled_canvas("Table 5: return of the last trial, normalised")
    intervals = [interval for _, interval in table.order]
    places = np.arange(len(intervals))
    for place, (method, _) in enumerate(table.order):
        scores = table.scores(method).ravel()
        label = "each task and seed" if place == 0 else None
        axes.plot(np.full(len(scores), place), scores, ".", color=ORANGE, alpha=0.6, label=label)
    label = "IQM" if table.seeds == 1 else f"IQM, 95% over {table.seeds} seeds of each task"
    style = {"color": BLUE, "marker": "o", "linestyle": "none", "capsize": 4}
    draw_intervals(axes, places, intervals, label=label, **style)
    axes.axhline(100, color=GREY, linestyle="--", label=REFERENCE)
    axes.axhline(0, color=GREY, linestyle=":", label="random policy")
    axes.set_xticks(places, [METHODS[method].title for method, _ in table.order], rotation=30, ha="right")
    axes.set_ylabel("normalised return")
    legend_below(canvas, axes)
    save(canvas, path)


def write_learning_curves(folder: Path, table: ReturnsTable) -> None:
    """Writes learning_curves.csv, a row per task, method, seed and share of the updates, and the plot."""
    curves = {method: table.learning_curve(method) for method in table.methods}
    curves = {method: curve for method, curve in curves.items() if curve[0]}  # it was trained for the task
    if not curves:
        return
    rows = [
        {
            "task": task,
            "method": method,
            "seed": seed,
            "share": share,
            "normalised": score[seed, column],
            **origin_columns(vars(table.results[TableCell(task, method, seed)])),
        }
        for method, (shares, scores) in curves.items()
        for share, score in zip(shares, scores, strict=True)
        for seed in range(table.seeds)
        for column, task in enumerate(table.tasks)
    ]
    write_rows(folder / "learning_curves.csv", rows)
    panels = ["interquartile mean", *table.tasks]
    down = -(-(len(panels) + 1) // ACROSS)  # one place is the legend's
    canvas = Canvas(figsize=(3.6 * ACROSS, 3.2 * down), layout="constrained")
    places: Sequence[Axes] = list(canvas.subplots(down, ACROSS, squeeze=False).flat)
    for number, (axes, title) in enumerate(zip(places, panels, strict=False)):
        for (method, (shares, scores)), colour in zip(curves.items(), PALETTE, strict=False):
            points = [
                mean_interval(each[:, number - 1], "seeds") if number else interquartile_mean_interval(each)
                for each in scores
            ]
            style = {"color": colour, "marker": "o", "markersize": 3, "capsize": 2}
            draw_intervals(axes, 100 * np.array(shares), points, label=METHODS[method].title, **style)
        axes.axhline(100, color=GREY, linestyle="--", linewidth=0.8)
        axes.axhline(0, color=GREY, linestyle=":", linewidth=0.8)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_xlabel("share of the updates, %")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    places[len(panels)].legend(*places[0].get_legend_handles_labels(), frameon=False, loc="upper left")
    over = f"; bars: 95% over {table.seeds} training seeds" if table.seeds > 1 else ""
    canvas.supylabel(f"normalised return of the last trial{over}")
    save(canvas, folder / "learning_curves.png")


def _normalised_table(table: ReturnsTable) -> TextTable:
    scores = {method: table.scores(method) for method in table.methods}
    published = paper.exorl_rows()

    def row(name: str, values: Mapping[str, Interval], printed: Mapping[str, Any]) -> dict[str, str]:
        theirs = {m: f" / {printed[p]}" for m in values if (p := METHODS[m].paper or "") in printed}
        cells = {METHODS[m].title: f"{value:.1f}{theirs.get(m, '')}" for m, value in values.items()}
        return {"task": name, **cells}

    by_task = [
        {m: mean_interval(s.T[i], "seeds") for m, s in scores.items()} for i in range(len(table.tasks))
    ]
    rows = [
        row(task, means, published.get(task, {})) for task, means in zip(table.tasks, by_task, strict=True)
    ]
    means = {m: mean_interval(s.mean(axis=1), "seeds") for m, s in scores.items()}
    rows.append(row("average", means, published["total_average"]))
    rows.append(row("IQM", {m: interquartile_mean_interval(s) for m, s in scores.items()}, {}))
    notes = [
        f"Normalised return of the last trial: {FORMULA}. The reference is the {REFERENCE} (of trajectories "
        "in which a policy acted), at which every trial aims too.",
        f"In brackets: 95% bootstrap intervals over {table.seeds} training seeds, the tasks taken as given."
        if table.seeds > 1
        else "One training seed, so nothing is known of the spread over seeds.",
        "After the slash: the paper's number.",
        paper.RETURN_CAVEAT,
    ]
    return TextTable("Table 5: last trial, normalised / the paper's", rows, notes)


def _returns_table(table: ReturnsTable) -> TextTable:
    names = (LAST, "return/best_of_trials")
    means = {m: [table.returns(m, name).mean(axis=0) for name in names] for m in table.methods}
    rows = [
        {"task": task, "reference": f"{table.reference[:, column].mean():.4g}"}
        | {METHODS[m].title: f"{last[column]:.4g} / {best[column]:.4g}" for m, (last, best) in means.items()}
        for column, task in enumerate(table.tasks)
    ]
    environments = table.results[TableCell(table.tasks[0], RANDOM, 0)].figure(LAST).n
    note = (
        f"Undiscounted returns, means over {environments} environments: the last trial, and each "
        "environment's best trial, which grows with the number of trials for any method. The paper reports "
        "the best trial for its Agentic Transformers."
    )
    return TextTable("Returns: last trial / best of the trials", rows, [note])


def _order_table(table: ReturnsTable) -> TextTable:
    def over(place: int, other: int) -> str:
        """How probably the method at a place does better than another one; empty unless that is worse."""
        if other <= place:
            return ""
        scores = [table.scores(table.order[each][0]) for each in (place, other)]
        better = improvement_interval(*scores)
        return f"**{better:.2f}**" if better.low is not None and better.low > 0.5 else f"{better:.2f}"

    titles = [METHODS[method].title for method, _ in table.order]
    rows = [
        {"method": titles[place], "IQM": f"{mean:.1f}"}
        | {f"over {titles[other]}": over(place, other) for other in range(1, len(titles))}
        for place, (_, mean) in enumerate(table.order)
    ]
    notes = [
        "IQM of the normalised last trials over tasks and seeds, best method first.",
        "Over: probability that a run of the method does better than one of the other, averaged over tasks, "
        "ties counted half (arXiv 2108.13264).",
        "**Bold**: the 95% bootstrap interval, stratified by task, lies above one half."
        if table.seeds > 1
        else "One training seed, so that none of these orders is certain.",
    ]
    return TextTable("Order of the methods, and which does better than which", rows, notes)


def _memory_table(memory: Mapping[str, str], hardware: str) -> TextTable:
    rows = [
        {
            "method": method.title,
            "tokens": f"{method.trajectories * 4}K",
            hardware: memory.get(name, "not asked"),
            "paper": "oom" if paper.exorl_rows()["total_average"].get(method.paper or "") == "oom" else "",
        }
        for name, method in AGENTIC.items()
    ]
    note = (
        f"Bytes per device of {hardware} for a train step of the 350M model, by its compiler; oom: more than "
        "a device has. One chain over all devices for the ring, one per device otherwise. Not asked: the "
        "compiler is not installed (extras aot for TPUs, cuda13 for GPUs) and no earlier answer is stored."
    )
    return TextTable("Memory of the 350M model", rows, [note])
