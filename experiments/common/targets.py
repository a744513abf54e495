"""Targets that are set before an experiment, and the verdict on what it found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import Figure, short_number

Measured = TypeVar("Measured")
"""What the measures of an experiment read."""


class NotMeasuredError(LookupError):
    """What was measured lacks a case that a target needs."""


@dataclass(frozen=True)
class Bound:
    """What an interval must satisfy: value from ``least`` to ``most``, bounds above ``low``, below ``high``.

    That two quantities hardly differ is judged by the bounds: a small difference found is not enough.
    """

    least: float = -inf
    low: float | None = None
    most: float = inf
    high: float | None = None

    def met(self, found: Interval) -> bool:
        """Whether ``found`` satisfies it; an interval without bounds satisfies no ``low`` or ``high``."""
        above = self.low is None or (found.low is not None and found.low > self.low)
        below = self.high is None or (found.high is not None and found.high < self.high)
        return above and below and self.least <= found.value <= self.most

    def __str__(self) -> str:
        if self == ABOVE_ZERO:
            return "above 0"
        parts = (
            ("at least", self.least),
            ("lower bound above", self.low),
            ("at most", self.most),
            ("upper bound below", self.high),
        )
        return ", ".join(f"{words} {number:g}" for words, number in parts if number not in (None, -inf, inf))


ABOVE_ZERO = Bound(least=float(np.nextafter(0.0, 1.0)))


@dataclass(frozen=True)
class Target(Generic[Measured]):
    """One row of the table of targets."""

    name: str
    measure: Callable[[Measured], Interval]
    """Computes what ``name`` says; raises ``NotMeasuredError``."""
    required: Bound
    """What the claim needs."""
    aim: Bound
    """What we hope for."""
    everywhere: bool = False
    """Whether every experiment of its kind must meet it, not only the main one."""
    aim_measure: Callable[[Measured], Interval] | None = None
    """Another quantity for the aim; None is ``measure``."""


class Check(NamedTuple):
    """A target and what was found; ``found`` is None where a case is missing."""

    target: Target[Any]
    found: Interval | None
    met: bool = False
    aim_met: bool = False

    @property
    def result(self) -> str:
        """One of pass, MISSED and not measured."""
        return "not measured" if self.found is None else "pass" if self.met else "MISSED"


@dataclass(frozen=True)
class Verdict:
    """What was found for each target, in their order."""

    claim: str
    """What may be said if every target is met."""
    checks: tuple[Check, ...]

    @property
    def claimed(self) -> bool:
        """Whether every target is met."""
        return all(check.met for check in self.checks)

    def __str__(self) -> str:
        if self.claimed:
            return f"verdict: {self.claim}"
        missed = [check.target.name for check in self.checks if not check.met]
        return f"verdict: NOT shown; {len(missed)} of {len(self.checks)} targets are not met"

    def table(self) -> Table:
        """Table for ``rich.print``: a row for each target."""
        columns = "target", "found", "t over seeds", "required", "aim", "result"
        table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for check in self.checks:
            target, found = check.target, _in_words(check.found)
            aim = f"{target.aim}{' (met)' if check.aim_met else ''}"
            over_seeds = "" if check.found is None else _in_words(check.found.over_seeds)
            table.add_row(target.name, found, over_seeds, str(target.required), aim, check.result)
        return table

    def figures(self) -> list[Figure]:
        """Each measured target with its intervals, and whether it is met as 1 or 0."""
        figures = []
        for target, found, met, _ in self.checks:
            if found is not None:
                figures.append(Figure.from_interval(f"target/{target.name}", found, "score"))
                if found.over_seeds is not None:
                    name = f"target/{target.name}/over_seeds"
                    figures.append(Figure.from_interval(name, found.over_seeds, "score"))
                figures.append(Figure(f"target/{target.name}/met", float(met), "1 = yes"))
        return [*figures, Figure("target/all_met", float(self.claimed), "1 = yes")]


def _in_words(interval: Interval | None) -> str:
    """The value with its interval, such as "0.876 (0.76 to 0.977)"."""
    if interval is None:
        return ""
    value, low, high = map(short_number, (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})" if low else value


def judge(claim: str, targets: Sequence[Target[Measured]], measured: Measured) -> Verdict:
    """Compares what was measured with targets."""

    def check(target: Target[Measured]) -> Check:
        try:
            found = target.measure(measured)
            aimed = found if target.aim_measure is None else target.aim_measure(measured)
        except NotMeasuredError:
            return Check(target, None)
        return Check(target, found, target.required.met(found), target.aim.met(aimed))

    return Verdict(claim, tuple(map(check, targets)))
