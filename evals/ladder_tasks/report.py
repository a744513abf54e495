"""Scores of the ladder: by task and length, and the effective length, as figures, tables and a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic

from agentic_ring.errors import DataError
from agentic_ring.results.intervals import Interval, wilson_interval
from agentic_ring.results.results_file import Figure
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import parse_tokens, short_tokens
from evals.ladder_tasks.documents import LadderQuestion
from evals.ladder_tasks.tasks import TASKS
from evals.lines.accuracy_plots import MISSES_TO_HITS
from evals.lines.readers import Answer
from evals.plots import save, titled_canvas

REFERENCE = "4k"
"""Length whose score the effective length is measured against."""
KEPT = 0.85
"""Share of that score that the lower end of the interval must stay above."""
ALL = "all tasks"

_Count = Annotated[int, pydantic.Field(ge=0)]


@dataclass(frozen=True)
class TaskAnswer:
    """One question and its answer.

    Attributes:
      case: number of the question, from 0, over all records of the length.
      task: name of the task.
      depth: place in the record of the first line that is needed, in [0, 1).
      expected: see ``LadderQuestion``.
      text: the answer, unchanged.
      score: score of the answer, in [0, 1].
      prompt_tokens: tokens of the whole prompt.
      seconds: time for the answer.
      prompt_digest: digest of the prompt, which tells the case from those of other sets.
      error: why there is no answer, or None; a resumed run asks such a question again.
      unfinished: why the answer stops before its end, or None.
      answer_tokens: tokens of the answer, with those of reasoning; None if they are not known.
      cached_tokens: tokens of the prompt that a server had read before; None if it does not say.
    """

    case: _Count
    task: str
    depth: Annotated[float, pydantic.Field(ge=0, lt=1)]
    expected: tuple[str, ...]
    text: str
    score: Annotated[float, pydantic.Field(ge=0, le=1)]
    prompt_tokens: _Count
    seconds: Annotated[float, pydantic.Field(ge=0)]
    prompt_digest: str
    error: str | None
    unfinished: str | None = None
    answer_tokens: _Count | None = None
    cached_tokens: _Count | None = None

    @classmethod
    def of(cls, case: int, question: LadderQuestion, answer: Answer, prompt_digest: str) -> "TaskAnswer":
        """Scores an answer."""
        return cls(
            case=case,
            task=question.task,
            depth=question.depth,
            expected=question.expected,
            text=answer.text,
            score=TASKS[question.task].score(question.expected, answer.text),
            prompt_tokens=answer.prompt_tokens,
            seconds=answer.seconds,
            prompt_digest=prompt_digest,
            error=answer.error,
            unfinished=answer.unfinished,
            answer_tokens=answer.answer_tokens,
            cached_tokens=answer.cached_tokens,
        )


@dataclass(frozen=True)
class LengthScore:
    """Scores of one length whose questions have all been asked."""

    name: str
    rows: Sequence[TaskAnswer]

    @property
    def prompt_tokens(self) -> float:
        """Average tokens of a prompt."""
        return float(np.mean([row.prompt_tokens for row in self.rows]))

    def answered(self, task: str = ALL) -> list[TaskAnswer]:
        """Answers without an error and with an end, of one task or of all."""
        return [
            row
            for row in self.rows
            if row.error is None and row.unfinished is None and task in (ALL, row.task)
        ]

    def score(self, task: str = ALL) -> Interval | None:
        """Mean score of a task, or of all; None without an answer.

        The interval is Wilson's for as many right answers as the scores add up to: scores in [0, 1] vary
        at most as much as right and wrong answers with the same mean.
        """
        scores = [row.score for row in self.answered(task)]
        return wilson_interval(sum(scores), len(scores)) if scores else None


def effective_length(scores: Sequence[LengthScore], task: str = ALL) -> str:
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


def _tasks(scores: Sequence[LengthScore]) -> list[str]:
    asked = {row.task for score in scores for row in score.rows}
    return [*(task for task in TASKS if task in asked), ALL]


def score_table(
    scores: Sequence[LengthScore], title: str, ruler: Mapping[str, Mapping[int, float]] | None = None
) -> TextTable:
    """Table with a row for each task and a column for each length; those of ``ruler_scores`` follow."""
    ruler = ruler or {}
    names = {parse_tokens(each.name): each.name for each in scores}
    names |= {length: short_tokens(length) for by in ruler.values() for length in by}
    rows = []
    for task in _tasks(scores):
        cells = {"task": task, "what is asked": TASKS[task].title if task in TASKS else ""}
        found = {each.name: each.score(task) for each in scores}
        cells |= {name: _with_interval(found.get(name)) for _, name in sorted(names.items())}
        rows.append({**cells, "effective length": effective_length(scores, task)})
    for task, by in ruler.items():
        cells = {"task": task, "what is asked": "RULER"}
        cells |= {name: f"{by[length]:.2f}" if length in by else "" for length, name in sorted(names.items())}
        rows.append({**cells, "effective length": ""})
    note = (
        "Mean scores with 95% intervals. Effective length: the longest up to which the lower end stays above "
        f"{KEPT:.0%} of the score at {REFERENCE}."
    )
    return TextTable(title, rows, [note])


def _with_interval(found: Interval | None) -> str:
    return "" if found is None else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def figures(scores: Sequence[LengthScore]) -> list[Figure]:
    """The figures of a results.json."""
    found = []
    for each in scores:
        for task in _tasks(scores):
            score = each.score(task)
            if score is not None:
                name = f"score/{task.replace(' ', '_')}/{each.name}"
                found.append(Figure.from_interval(name, score, "share of the full score"))
        found.append(Figure(f"prompt_tokens/{each.name}", each.prompt_tokens, "tokens"))
        found.append(Figure(f"not_answered/{each.name}", len(each.rows) - len(each.answered()), "questions"))
    return found


def write_summary(path: Path, scores: Sequence[LengthScore]) -> None:
    """Writes a CSV with a row for each task and length."""
    write_rows(
        path,
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


def plot_ladder(path: Path, name: str, scores: Sequence[LengthScore]) -> None:
    """Draws the scores with a row for each task and a column for each length."""
    tasks = _tasks(scores)
    shares = np.full((len(tasks), len(scores)), np.nan)
    canvas, axes = titled_canvas(f"ladder: {name}")
    for (row, column), _ in np.ndenumerate(shares):
        found = scores[column].score(tasks[row])
        if found is not None:
            shares[row, column] = found.value
            colour = "white" if found.value > 0.8 else "black"
            axes.text(column, row, f"{found.value:.2f}", color=colour, ha="center", va="center")
    image = axes.imshow(shares, cmap=MISSES_TO_HITS, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(scores)), [score.name for score in scores])
    labels = [f"{task}\n({effective_length(scores, task)})".removesuffix("\n()") for task in tasks]
    axes.set_yticks(range(len(tasks)), labels)
    axes.set_xlabel("length; below each task, its effective length")
    canvas.colorbar(image, ax=axes, label="mean score")
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
