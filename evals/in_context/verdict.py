"""Results of the rollouts in hidden tasks, and the pre-registered criteria for in-context learning.

In-context learning is claimed only if all of these hold, each with 95% intervals that do not overlap:

* the last of several trials, one after another, beats the first;
* it beats every control;

and if a trial after a context of the right task returns at least ``MARGIN`` more than a trial after a
context of another task.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from evals.common.intervals import Interval, mean_interval
from evals.common.results import Figure, short_number
from evals.in_context.task_rollouts import CONDITIONS, CONTEXTS, Condition
from evals.rollouts.returns import trial_intervals

MARGIN = 0.2


@dataclass(frozen=True)
class Check:
    """One criterion.

    Attributes:
      claim: the criterion in words.
      better, worse: the compared estimates.
      holds: whether the criterion is met.
    """

    claim: str
    better: Interval
    worse: Interval
    holds: bool

    def __str__(self) -> str:
        found = f"{in_words(self.better)} against {in_words(self.worse)}"
        return f"{'yes' if self.holds else 'NO '}  {self.claim}: {found}"


@dataclass(frozen=True)
class Verdict:
    """The result of all criteria."""

    checks: tuple[Check, ...]

    @property
    def claimed(self) -> bool:
        """Whether all criteria hold, so that in-context learning may be claimed."""
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        found = "learns in context" if self.claimed else "learning in context is NOT shown"
        return "\n".join([f"verdict: {found}", *map(str, self.checks)])


def judge(
    first: Interval, last: Interval, controls: Mapping[str, Interval], right: Interval, wrong: Interval
) -> Verdict:
    """Applies the criteria to one task, or to several tasks pooled on one scale.

    Args:
      first, last: return of the first and of the last online trial.
      controls: return of each control, by name.
      right, wrong: return of a trial after a stored context of the right task, and of another task.
    """
    return Verdict(
        (
            Check("last trial above the first", last, first, _apart(last, first)),
            *(
                Check(f"last trial above {name}", last, control, _apart(last, control))
                for name, control in controls.items()
            ),
            Check(
                f"context of the right task above the wrong one's by {MARGIN:.0%}",
                right,
                wrong,
                right.value > 0 and right.value >= (1 + MARGIN) * wrong.value,
            ),
        )
    )


def _apart(better: Interval, worse: Interval) -> bool:
    """Whether the intervals do not overlap; False for a single run, which has no interval."""
    return better.low is not None and worse.high is not None and better.low > worse.high


def in_words(interval: Interval) -> str:
    """The value with its interval, such as "0.876 (0.76 to 0.977)"."""
    if interval.low is None or interval.high is None:
        return short_number(interval.value)
    return f"{short_number(interval.value)} ({short_number(interval.low)} to {short_number(interval.high)})"


POOLED = "pooled"
BEST_ONLINE = "online_best"
"""Best online trial, which the Agentic Transformer's paper reports; no criterion uses it."""
BEST_OF_NO_CONTEXT = "no_context_best"
"""Best of as many trials without context: the control for ``BEST_ONLINE``."""


@dataclass(frozen=True)
class TaskFamilyReport:
    """Undiscounted returns of every condition in every task.

    Attributes:
      returns: float64 [E, trials] by task and condition; the environments' seeds are always the same.
      targets: target return of each task; pooled returns are shares of it.
      first_seed: seed of the first environment.
      draws: number of stored contexts; consecutive environments, equally many for each, share one.
    """

    returns: Mapping[str, Mapping[Condition, np.ndarray]]
    targets: Mapping[str, float]
    first_seed: int
    draws: int

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, and ``POOLED``."""
        return (*self.returns, POOLED)

    def unit(self, task: str) -> str:
        """Unit of the returns of a task."""
        return "target" if task == POOLED else "return"

    def task_returns(self, task: str) -> Mapping[Condition, np.ndarray]:
        """Returns [E, trials] by condition; a pooled return is an environment's mean over the tasks."""
        if task != POOLED:
            return self.returns[task]
        return {
            condition: np.mean(
                [found[condition] / self.targets[name] for name, found in self.returns.items()], axis=0
            )
            for condition in CONDITIONS
        }

    def intervals(self, task: str) -> dict[str, list[Interval]]:
        """Mean of each trial by condition, and of the best trials online and without context.

        Environments that share a stored context count as one run.
        """
        return {
            **{
                name: trial_intervals(self._runs(name, returns))
                for name, returns in self.task_returns(task).items()
            },
            BEST_ONLINE: [self._best(task, "online")],
            BEST_OF_NO_CONTEXT: [self._best(task, "no_context")],
        }

    def _runs(self, condition: Condition, returns: np.ndarray) -> np.ndarray:
        """Independent runs [R, trials] of returns [E, trials]; environments with one context are averaged."""
        if condition not in CONTEXTS:
            return returns
        return returns.reshape(self.draws, -1, returns.shape[1]).mean(axis=1)

    def _best(self, task: str, condition: Condition) -> Interval:
        """Mean of each environment's best trial, which may be another trial in each task."""
        best = {name: found[condition].max(axis=1) for name, found in self.returns.items()}
        if task != POOLED:
            return mean_interval(best[task])
        return mean_interval(np.mean([best[name] / self.targets[name] for name in best], axis=0))

    def verdict(self, task: str) -> Verdict:
        """The verdict on one task, or on all tasks pooled."""
        found = self.intervals(task)
        online = found["online"]
        not_controls = ("online", BEST_ONLINE, "right")
        controls = {name: trials[-1] for name, trials in found.items() if name not in not_controls}
        return judge(online[0], online[-1], controls, found["right"][0], found["wrong"][0])

    def figures(self) -> list[Figure]:
        """All intervals, and all verdicts as 1 or 0."""
        figures = []
        for task in self.tasks:
            for name, trials in self.intervals(task).items():
                for number, trial in enumerate(trials, start=1):
                    figure = f"{task}/{name}" + (f"/trial_{number}" if len(trials) > 1 else "")
                    figures.append(Figure.from_interval(figure, trial, self.unit(task)))
            claimed = float(self.verdict(task).claimed)
            figures.append(Figure(f"{task}/learns_in_context", claimed, "1 = yes"))
        return figures

    def table(self, title: str) -> Table:
        """Table for ``rich.print``: a row for each trial of a condition, a column for each task."""
        found = {task: self.intervals(task) for task in self.tasks}
        table = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
        )
        table.add_column("", no_wrap=True)
        for task in self.tasks:
            table.add_column(f"{task}\n({self.unit(task)})", justify="right")
        for name, trials in found[POOLED].items():
            for index in range(len(trials)):
                number = f", trial {index + 1}" if len(trials) > 1 else ""
                cells = (in_words(found[task][name][index]) for task in self.tasks)
                table.add_row(name.replace("_", " ") + number, *cells)
        return table

    def rows(self) -> list[dict[str, str | int | float]]:
        """A row for each rollout: task, condition, trial, seed, return."""
        return [
            {
                "task": task,
                "condition": condition,
                "trial": trial,
                "seed": self.first_seed + environment,
                "return": round(float(value), 3),
            }
            for task, found in self.returns.items()
            for condition, returns in found.items()
            for (environment, index), value in np.ndenumerate(returns)
            for trial in (index + 1,)
        ]
