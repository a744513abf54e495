"""Plots of the experiment on trained context length: returns over trials, by cues and in controls, regret."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from agentic_ring.results.intervals import Interval, hierarchical_interval
from evals.in_context.references import regret
from evals.in_context.verdict import (
    ARMS,
    BLOCK,
    CUES,
    NOTHING,
    ONLINE,
    ORACLE,
    RIGHT_PAY,
    SPOILED,
    Case,
    Returns,
    block,
)
from evals.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    draw_intervals,
    error_bars,
    legend_below,
    save,
    titled_canvas,
)

BLACK = "#000000"
COLOURS = {"n1": GREY, "n4": PINK, "n16": ORANGE, "n32": GREEN, "n128": BLUE, ORACLE: BLACK}
CONTROLS = (RIGHT_PAY, *SPOILED, NOTHING)
EXACT_CONTROLS = {f"thompson_{name}": name for name in CONTROLS}
"""Conditions of exact Thompson sampling behind the same stored trials, and those of the model."""


def mean_return(quantity: np.ndarray) -> Interval:
    """Mean of a quantity [S, E] with its hierarchical interval over seeds and tasks."""
    return hierarchical_interval(quantity[None], lambda drawn: drawn[..., 0, :, :].mean(axis=(-2, -1)))


def _blocks(returns: Returns, case: Case) -> tuple[np.ndarray, list[Interval]]:
    """Middle trial and mean return of each block of trials."""
    firsts = range(0, returns[case].shape[-1] - BLOCK + 1, BLOCK)
    middles = np.array(firsts) + (BLOCK + 1) / 2
    return middles, [mean_return(block(returns, case, first)) for first in firsts]


def _curve(axes: Axes, at: np.ndarray, found: list[Interval], arm: str, label: str) -> None:
    draw_intervals(axes, at, found, color=COLOURS.get(arm, GREY), marker="o", capsize=3, label=label)


def _label(arm: str) -> str:
    return "oracle, told the goal" if arm == ORACLE else f"n = {arm[1:]} trials in training and context"


def draw_learning_curves(axes: Axes, returns: Returns) -> None:
    """Draws the mean return of blocks of trials for each arm, and its reference with the same memory."""
    for arm in (*ARMS, ORACLE):
        case = Case(arm, CUES)
        if case in returns:
            _curve(axes, *_blocks(returns, case), arm, _label(arm))
        thompson = case._replace(condition="thompson")
        if thompson in returns:
            at, found = _blocks(returns, thompson)
            values = [interval.value for interval in found]
            label = f"exact Thompson sampling, memory of {arm[1:]}"
            axes.plot(at, values, color=COLOURS[arm], linestyle=":", label=label)
    for condition, style in (("told", "--"), ("random", "-.")):
        case = Case(ORACLE, CUES, condition)
        if case in returns:
            value = float(returns[case].mean())
            label = f"{condition.replace('told', 'controller, told the goal')}, {value:.2f}"
            axes.axhline(value, color=GREY, linestyle=style, label=label)
    axes.set_xlabel("trial")
    axes.set_ylabel(f"mean return of {BLOCK} trials; bars: 95%")
    axes.set_ylim(bottom=0)


def draw_by_cues(axes: Axes, returns: Returns) -> None:
    """Draws the mean return of the last block of trials over the number of cues, for each arm."""
    counts = sorted({case.cues for case in returns if case.condition == ONLINE})
    for arm in (*ARMS, ORACLE):
        cues = [count for count in counts if Case(arm, count) in returns]
        if cues:
            found = [mean_return(block(returns, Case(arm, count))) for count in cues]
            _curve(axes, np.array(cues), found, arm, _label(arm))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("cues of a task (what there is to learn)")
    axes.set_ylabel("mean return; bars: 95%")
    axes.set_ylim(bottom=0)


def draw_regret(axes: Axes, returns: Returns) -> None:
    """Draws the return that each arm has lost up to the end of each block of trials.

    It is lost to the controller that is told the goal, in the same trials of the same tasks; to the learned
    oracle where no controller can plan.
    """
    told, oracle = Case(ORACLE, CUES, "told"), Case(ORACLE, CUES)
    best = told if told in returns else oracle
    for arm in ARMS:
        case = Case(arm, CUES)
        if case in returns:
            lost = regret(returns[case], returns[best])
            ends = np.arange(min(BLOCK, lost.shape[-1]) - 1, lost.shape[-1], BLOCK)
            _curve(axes, ends + 1, [mean_return(lost[..., end]) for end in ends], arm, _label(arm))
    axes.set_xlabel("trial")
    name = "controller that is told the goal" if best == told else "learned oracle"
    axes.set_ylabel(f"sum of returns lost to the\n{name}; bars: 95%")


def draw_controls(axes: Axes, returns: Returns) -> None:
    """Draws the return behind stored random trials with their right pay, spoiled pay, and without them."""
    found = [mean_return(returns[Case("n128", CUES, each)].mean(axis=-1)) for each in CONTROLS]
    values = [interval.value for interval in found]
    names = [name.replace("_", "\n") for name in CONTROLS]
    axes.bar(names, values, yerr=error_bars(found), color=[GREEN, PINK, ORANGE, SKY, GREY], capsize=4)
    exact = [Case("n128", CUES, each) for each in EXACT_CONTROLS]
    if exact[0] in returns:
        found = [mean_return(returns[each].mean(axis=-1)) for each in exact]
        label = "exact Thompson sampling behind the same trials"
        draw_intervals(
            axes, np.arange(len(exact)), found, color=BLACK, marker="D", linestyle="none", label=label
        )
    axes.set_ylabel("mean return; bars: 95%")


class Plot(NamedTuple):
    """A plot of the returns of all arms: its title, and the function that draws it on axes."""

    title: str
    draw: Callable[[Axes, Returns], None]


PLOTS = {
    "learning_curves": Plot(f"{CUES} cues: return over trials", draw_learning_curves),
    "by_cues": Plot(f"return of the last {BLOCK} trials by number of cues", draw_by_cues),
    "regret": Plot(f"{CUES} cues: regret over trials", draw_regret),
    "controls": Plot(f"{CUES} cues: return behind stored random trials", draw_controls),
}
"""Every plot, by the name of its file."""


def write_plots(directory: Path, family: str, returns: Returns) -> None:
    """Writes every plot as a PNG file."""
    for name, plot in PLOTS.items():
        canvas, axes = titled_canvas(f"{family}, {plot.title}")
        plot.draw(axes, returns)
        legend_below(canvas, axes)
        save(canvas, directory / f"{name}.png")
