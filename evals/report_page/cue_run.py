"""Data of an in-context run for a report: returns of all arms, losses, and recorded trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_ring.data.families import family_named
from agentic_ring.errors import DataError
from agentic_ring.results.results_file import Results
from agentic_ring.training.metrics_log import read_metrics
from evals.in_context import recorded_trials, returns_file
from evals.in_context.recorded_trials import RecordedTrials, read_recorded_trials
from evals.in_context.returns_file import read_returns
from evals.in_context.verdict import Returns, Verdict, judge
from evals.report_page.drawn_trials import drawn_film
from evals.report_page.filmstrip import Strip


@dataclass(frozen=True)
class CueRun:
    """What only an in-context run has.

    Attributes:
      returns: returns of every case.
      verdict: the targets, judged on these returns.
      recorded: recorded trials of the arm n128; None if there are none.
    """

    returns: Returns
    verdict: Verdict
    recorded: RecordedTrials | None

    def film(self, family: str) -> list[Strip]:
        """Drawn frames of the first and the last recorded trial; none without a record."""
        return [] if self.recorded is None else drawn_film(family_named(family), self.recorded)


def is_cue_run(directory: Path) -> bool:
    """Whether the folder is that of a finished in-context run."""
    return (directory / returns_file.FILE_NAME).is_file()


def read_cue_run(directory: Path, results: Results, missing: dict[str, str]) -> CueRun:
    """Reads an in-context run; adds the reason for each absent part to ``missing``.

    Raises:
      DataError: the file of the returns is damaged.
    """
    returns = read_returns(directory / returns_file.FILE_NAME)
    recorded = None
    try:
        recorded = read_recorded_trials(directory / "arms" / "n128-seed0" / recorded_trials.FILE_NAME)
    except DataError as error:
        missing["attention"] = missing["film"] = str(error)
    return CueRun(returns, judge(returns, results.config["family"], results.config["pay"]), recorded)


def read_arm_losses(directory: Path, results: Results) -> Mapping[str, Sequence[dict[str, Any]]]:
    """Logged steps of the first training seed by arm, counted over all stages of its training."""
    losses = {}
    for arm in (str(each["name"]) for each in results.config.get("arms", ())):
        rows: list[dict[str, Any]] = []
        folder = directory / "arms" / f"{arm}-seed0"
        number = 1
        while (path := folder / f"stage{number}" / "metrics.jsonl").exists():
            before = rows[-1]["step"] if rows else 0
            rows += [row | {"step": before + row["step"]} for row in read_metrics(path) if "loss" in row]
            number += 1
        if rows:
            losses[arm] = rows
    return losses
