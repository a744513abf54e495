"""The report of the ladder: scores by task and length, and the effective length of each task."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from agentic_ring.errors import DataError
from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import Figure, write_rows
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import parse_tokens, short_tokens
from evals.plots import save, titled_canvas
from evals.retrieval.plots import draw_shares
from evals.retrieval.scores import ALL, SetScore
from evals.retrieval.tasks import TASKS

REFERENCE = "4k"
"""Length whose score the effective length is measured against."""
KEPT = 0.85
"""Share of that score that the lower end of the interval must stay above."""


@dataclass(frozen=True)
class LadderReport:
    """What the command shows, by task; ``ruler`` are RULER's scores from ``ruler_scores``."""

    ruler: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    title = "ladder"
    settings: Mapping[str, str] = field(default_factory=dict)

    def figures(self, scores: Sequence[SetScore]) -> list[Figure]:
        """Figures for ``results.json``."""
        found = []
        for each in scores:
            for task in _tasks(scores):
                score = each.score(task)
                if score is not None:
                    name = f"score/{task.replace(' ', '_')}/{each.name}"
                    found.append(Figure.from_interval(name, score, "share of the full score"))
            found.append(Figure(f"prompt_tokens/{each.name}", each.prompt_tokens, "tokens"))
            found.append(
                Figure(f"not_answered/{each.name}", len(each.predictions) - len(each.answered()), "questions")
            )
        return found

    def table(self, scores: Sequence[SetScore], title: str) -> TextTable:
        """Table with a row for each task and a column for each length; those of RULER follow."""
        names = {parse_tokens(each.name): each.name for each in scores}
        names |= {length: short_tokens(length) for by in self.ruler.values() for length in by}
        rows = []
        for task in _tasks(scores):
            cells = {"task": task, "what is asked": TASKS[task].title if task in TASKS else ""}
            found = {each.name: each.score(task) for each in scores}
            cells |= {name: _with_interval(found.get(name)) for _, name in sorted(names.items())}
            rows.append({**cells, "effective length": effective_length(scores, task)})
        for task, by in self.ruler.items():
            cells = {"task": task, "what is asked": "RULER"}
            cells |= {
                name: f"{by[length]:.2f}" if length in by else "" for length, name in sorted(names.items())
            }
            rows.append({**cells, "effective length": ""})
        note = (
            "Mean scores with 95% intervals. Effective length: the longest up to which the lower end stays "
            f"above {KEPT:.0%} of the score at {REFERENCE}."
        )
        return TextTable(title, rows, [note])

    def write(self, directory: Path, name: str, scores: Sequence[SetScore]) -> None:
        """Writes a CSV with a row for each task and length, and a picture."""
        write_rows(
            directory / "summary.csv",
            [
                {
                    "task": task,
                    "length": each.name,
                    "prompt_tokens": f"{each.prompt_tokens:.0f}",
                    "score": f"{score.value:.4f}",
                    "low": f"{score.low:.4f}",
                    "high": f"{score.high:.4f}",
                    "answers": str(score.n),
                    "effective_length": effective_length(scores, task),
                }
                for each in scores
                for task in _tasks(scores)
                if (score := each.score(task)) is not None
            ],
        )
        if any(score.answered() for score in scores):
            plot_ladder(directory / "ladder.png", name, scores)


def effective_length(scores: Sequence[SetScore], task: str = ALL) -> str:
    """The longest length up to which the interval's lower end stays above 85% of the score at 4K.

    Returns:
      Its name, such as ``64k``; "none" if even 4K is not kept, and "" without answers at 4K.
    """
    reference = next((score.score(task) for score in scores if score.name == REFERENCE), None)
    if reference is None:
        return ""
    longest = "none"
    for score in scores:
        found = score.score(task)
        if found is None or found.low is None or found.low <= KEPT * reference.value:
            break
        longest = score.name
    return longest


def _tasks(scores: Sequence[SetScore]) -> list[str]:
    asked = {row.task for score in scores for row in score.predictions}
    return [*(task for task in TASKS if task in asked), ALL]


def _with_interval(found: Interval | None) -> str:
    return "" if found is None else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def plot_ladder(path: Path, name: str, scores: Sequence[SetScore]) -> None:
    """Draws the scores with a row for each task and a column for each length."""
    tasks = _tasks(scores)
    found = {
        (row, column): score.value
        for row, task in enumerate(tasks)
        for column, each in enumerate(scores)
        if (score := each.score(task)) is not None
    }
    shares = np.full((len(tasks), len(scores)), np.nan)
    for at, value in found.items():
        shares[at] = value
    canvas, axes = titled_canvas(f"ladder: {name}")
    labels = [f"{task}\n({effective_length(scores, task)})".removesuffix("\n()") for task in tasks]
    texts = {at: f"{value:.2f}" for at, value in found.items()}
    draw_shares(canvas, axes, shares, texts, labels, [score.name for score in scores], "mean score")
    axes.set_xlabel("length; below each task, its effective length")
    save(canvas, path)


def ruler_scores(path: Path) -> dict[str, dict[int, float]]:
    """The scores by length of RULER's tasks in the results of ``evals/harness.py``.

    Raises:
      DataError: the file cannot be read, or has no such score.
    """
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["results"]
        # The harness names a metric "4096,none", and writes -1 for a length that was not run.
        scores = {
            task: {
                int(length): float(value)
                for metric, value in metrics.items()
                if (length := metric.partition(",")[0]).isdigit() and float(value) >= 0
            }
            for task, metrics in tasks.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} holds no results of evals/harness.py ({error!r}); run that first") from error
    if not any(scores.values()):
        raise DataError(f"{path} has no score of a RULER task; run evals/harness.py --tasks ruler")
    return {task: by for task, by in scores.items() if by}
