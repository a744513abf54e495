"""Results of a command: ``results.json``, with every figure and its interval.

Other tools rely on this format::

    {"command": str, "commit": str | null, "hardware": {...}, "versions": {package: str},
     "config": {...}, "wall_seconds": {stage: seconds},
     "figures": [{"name", "value", "low", "high", "unit", "n", "over", "paper"}, ...], "digest": str}
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentic_ring.errors import ArgumentError
from agentic_ring.extras import needs_extra
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.provenance import provenance
from agentic_ring.results.intervals import Interval

with needs_extra("models"):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One reported number.

    Attributes:
      name: path-like name, such as ``return/last_trial``.
      unit: unit of the value, such as ``return`` or ``tokens/s``.
      low, high: bounds of the 95% interval, or None without an interval.
      n: number of independent units that were averaged.
      over: what these units are, such as ``environments`` or ``tasks of 3 seeds``.
      paper: the paper's figure, which may be another quantity, or None.

    Raises:
      ArgumentError: a number is not finite, a bound is missing, or the bounds are in the wrong order.
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    n: int = 1
    paper: float | None = None
    over: str = ""

    def __post_init__(self):
        for field in ("value", "low", "high", "n", "paper"):
            number = getattr(self, field)
            if number is not None and not math.isfinite(number):
                raise ArgumentError(
                    f"{field} of figure {self.name!r} is {number}; only finite numbers can be reported: "
                    "find the cause, or leave the figure out"
                )
        low, high = self.low, self.high
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            raise ArgumentError(
                f"figure {self.name!r} needs two bounds in order, or none: low {self.low}, high {self.high}"
            )

    @classmethod
    def from_interval(cls, name: str, interval: Interval, unit: str, paper: float | None = None) -> "Figure":
        """The figure of an estimate and its interval."""
        bounds = interval.low, interval.high
        return cls(name, interval.value, unit, *bounds, interval.n, paper, interval.over)


@dataclass(frozen=True)
class Results:
    """The content of a ``results.json``: the fields of ``provenance``, and those of the run."""

    command: str
    commit: str | None
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    wall_seconds: Mapping[str, float]
    figures: tuple[Figure, ...]

    @classmethod
    def of_this_process(
        cls, config: Mapping[str, Any], wall_seconds: Mapping[str, float], figures: Sequence[Figure]
    ) -> "Results":
        """Results whose command, commit, hardware and versions are those of the running process."""
        return cls(**provenance(), config=config, wall_seconds=wall_seconds, figures=tuple(figures))

    def figure(self, name: str) -> Figure:
        """The figure with this name; an ``ArgumentError`` if there is none."""
        named = {figure.name: figure for figure in self.figures}
        if name not in named:
            raise ArgumentError(f"no figure is named {name!r}; there are: {', '.join(named)}")
        return named[name]


def write_results(path: Path, results: Results) -> None:
    """Writes ``results`` as JSON, atomically: if it fails, an existing file stays unchanged.

    Raises:
      ArgumentError: two figures have the same name, or JSON cannot represent a value, such as NaN.
    """
    names = Counter(figure.name for figure in results.figures)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise ArgumentError(f"figures named more than once: {', '.join(twice)}; each needs a name of its own")
    try:
        write_json(path, asdict(results))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the results cannot be written as JSON: {error}") from error


def read_results(path: Path) -> Results:
    """Reads a ``results.json``; a ``DataError`` if it is missing, not JSON, was changed, or lacks a field."""
    return read_json(path, Results, "give the results.json of a finished run, or run the experiment again")


def figure_table(figures: Sequence[Figure], title: str) -> Table:
    """Table of the figures for ``rich.print``, with the paper's figures if there are any."""
    # In 80 columns units of several words and the longest names go over two lines; no number is cut.
    style = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", caption=_over(figures), caption_justify="left", **style)
    table.add_column("figure", overflow="fold")
    for column in ("value", "95% interval", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unit", max_width=8)
    with_paper = any(figure.paper is not None for figure in figures)
    if with_paper:
        table.add_column("paper", justify="right", no_wrap=True)
    for figure in figures:
        spread = "" if figure.low is None else f"{short_number(figure.low)} to {short_number(figure.high)}"
        paper = [short_number(figure.paper)] if with_paper else []
        table.add_row(figure.name, short_number(figure.value), spread, str(figure.n), figure.unit, *paper)
    return table


def _over(figures: Sequence[Figure]) -> str | None:
    """What the intervals are over, with the names of those that are not over what most are."""
    names: dict[str, list[str]] = {}
    for figure in figures:
        if figure.low is not None and figure.over:
            names.setdefault(figure.over, []).append(figure.name)
    most = max(names, key=lambda over: len(names[over]), default=None)
    others = [f"{', '.join(each)}: over {over}" for over, each in names.items() if over != most]
    return most and "; ".join([f"intervals are over {most}", *others])


def short_number(number: float | None) -> str:
    """Formats a number with four significant digits, or as a whole number: 0.01234, 12.34, 123,456."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 or number == round(number) else f"{number:.4g}"
