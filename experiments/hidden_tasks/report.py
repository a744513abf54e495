"""What the experiment on trained context length reports: returns of all cells, figures, rows and plots."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from agentic_ring.data.hidden_tasks.bodies import family_named
from agentic_ring.results.intervals import Interval, hierarchical_interval
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.results.rows import write_rows
from evals import plots
from evals.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY
from experiments.hidden_tasks import rollouts
from experiments.hidden_tasks.rollouts import LONGEST, RANDOM, STORED
from experiments.hidden_tasks.variants import VariantCell, VariantConfig
from experiments.hidden_tasks.verdict import (
    BLOCK,
    CUES,
    NOTHING,
    ONLINE,
    ORACLE,
    VARIANTS,
    Case,
    Returns,
    Verdict,
    block,
)

COLOURS = {"n1": GREY, "n4": PINK, "n16": ORANGE, "n32": GREEN, LONGEST: BLUE, ORACLE: "#000000"}
CONTROLS = (*STORED, NOTHING)


def all_returns(cells: Mapping[VariantCell, VariantConfig], output: Path) -> Returns:
    """Returns [seeds, tasks, trials] of every case of finished ``cells``, as their processes wrote them.

    Raises:
      DataError: a file is missing or damaged.
    """
    found: dict[Case, list[np.ndarray]] = {}
    for cell, config in cells.items():
        for case in rollouts.variant_cases(cell.variant, family_named(config.stages[-1].chains.family)):
            path = rollouts.returns_path(cell.folder(output), case)
            found.setdefault(case, []).append(rollouts.read_returns(path, config.evaluation.tasks))
    return {case: np.stack(each) for case, each in found.items()}


def mean_return(quantity: np.ndarray) -> Interval:
    """Mean of a quantity [S, E] with its hierarchical interval over seeds and tasks."""
    return hierarchical_interval(quantity[None], lambda drawn: drawn[..., 0, :, :].mean(axis=(-2, -1)))


def all_figures(returns: Returns, verdict: Verdict) -> list[Figure]:
    """Every figure of ``results.json``: returns, controls, and what the verdict was found on."""

    def figure(name: str, quantity: np.ndarray) -> Figure:
        return Figure.from_interval(name, mean_return(quantity), "return")

    return [
        figure("return/random", returns[Case(ORACLE, CUES, RANDOM)].mean(axis=-1)),
        figure("return/oracle", returns[Case(ORACLE, CUES)].mean(axis=-1)),
        *(figure(f"control/{name}", returns[Case(LONGEST, CUES, name)].mean(axis=-1)) for name in CONTROLS),
        *(
            figure(f"return/{_name(case)}/{part}16", block(returns, case, first))
            for case in returns
            if case.condition not in CONTROLS and case.variant != ORACLE
            for part, first in (("first", 0), ("last", -16))
        ),
        *verdict.figures(),
    ]


def _name(case: Case) -> str:
    """Such as n128, or n128/unseen or n128/cues4 where it is not the main case."""
    parts = (f"cues{case.cues}", case.condition, case.region)
    usual = (f"cues{CUES}", ONLINE, "seen")
    return "/".join((case.variant, *(part for part in parts if part not in usual)))


def trial_rows(returns: Returns) -> list[dict[str, Any]]:
    """A row for each case, training seed and trial: the mean return over the tasks."""
    return [
        {**case._asdict(), "seed": seed, "trial": trial + 1, "return": round(float(value), 4)}
        for case, found in returns.items()
        for (seed, trial), value in np.ndenumerate(found.mean(axis=1))
    ]


def task_rows(returns: Returns) -> list[dict[str, Any]]:
    """A row for each case, training seed and task: mean returns of the first and the last block of trials."""
    rows = []
    for case, found in returns.items():
        first, last = (block(returns, case, start) for start in (0, -min(BLOCK, found.shape[-1])))
        for (seed, task), value in np.ndenumerate(first):
            ends = {"first": round(float(value), 4), "last": round(float(last[seed, task]), 4)}
            rows.append({**case._asdict(), "seed": seed, "task": task, **ends})
    return rows


def write_report(
    directory: Path, config: Mapping[str, Any], seconds: dict[str, float], returns: Returns, verdict: Verdict
) -> None:
    """Writes ``results.json``, ``trials.csv``, ``tasks.csv`` and the plots; ``config`` names the family."""
    results = Results.of_this_process(config, seconds, all_figures(returns, verdict))
    write_results(directory / "results.json", results)
    write_rows(directory / "trials.csv", trial_rows(returns))
    write_rows(directory / "tasks.csv", task_rows(returns))
    for name, (title, draw) in PLOTS.items():
        canvas, axes = plots.titled_canvas(f"{config['family']}, {title}")
        draw(axes, returns)
        plots.legend_below(canvas, axes)
        plots.save(canvas, directory / f"{name}.png")


def _curve(axes: Axes, at: Any, found: list[Interval], variant: str) -> None:
    label = "oracle" if variant == ORACLE else f"n = {variant[1:]} trials in training and context"
    plots.draw_intervals(axes, at, found, color=COLOURS[variant], marker="o", capsize=3, label=label)


def draw_learning_curves(axes: Axes, returns: Returns) -> None:
    """Draws the mean return of blocks of trials for each variant."""
    for case in _main_cases(returns):
        firsts = range(0, returns[case].shape[-1] - BLOCK + 1, BLOCK)
        found = [mean_return(block(returns, case, first)) for first in firsts]
        _curve(axes, np.array(firsts) + (BLOCK + 1) / 2, found, case.variant)
    random = float(returns[Case(ORACLE, CUES, RANDOM)].mean())
    axes.axhline(random, color=GREY, linestyle="-.", label=f"random, {random:.2f}")
    axes.set(xlabel="trial", ylabel=f"mean return of {BLOCK} trials\nbars: 95% over tasks of seeds")
    axes.set_ylim(bottom=0)


def _main_cases(returns: Returns) -> list[Case]:
    """The main case of each variant that is there, the oracle last."""
    return [case for name in (*VARIANTS, ORACLE) if (case := Case(name, CUES)) in returns]


def draw_by_cues(axes: Axes, returns: Returns) -> None:
    """Draws the mean return of the last block of trials over the number of cues, for each variant."""
    counts = sorted({case.cues for case in returns if case.condition == ONLINE})
    for main in _main_cases(returns):
        cases = [case for count in counts if (case := main._replace(cues=count)) in returns]
        found = [mean_return(block(returns, case)) for case in cases]
        _curve(axes, [case.cues for case in cases], found, main.variant)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("cues of a task (what there is to learn)")
    axes.set_ylabel("mean return\nbars: 95% over tasks of seeds")
    axes.set_ylim(bottom=0)


def draw_controls(axes: Axes, returns: Returns) -> None:
    """Draws the return behind stored random trials with right and corrupted rewards, and without them."""
    found = [mean_return(returns[Case(LONGEST, CUES, each)].mean(axis=-1)) for each in CONTROLS]
    values = [interval.value for interval in found]
    names = [name.replace("_", "\n") for name in CONTROLS]
    colours = [GREEN, PINK, ORANGE, SKY, GREY]
    axes.bar(names, values, yerr=plots.error_bars(found), color=colours, capsize=4)
    axes.set_ylabel("mean return\nbars: 95% over tasks of seeds")


PLOTS: dict[str, tuple[str, Callable[[Axes, Returns], None]]] = {
    "learning_curves": (f"{CUES} cues: return over trials", draw_learning_curves),
    "by_cues": (f"return of the last {BLOCK} trials by number of cues", draw_by_cues),
    "controls": (f"{CUES} cues: return behind stored random trials", draw_controls),
}
"""Title of every plot and the function that draws it, by the name of its file."""
