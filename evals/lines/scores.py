"""Scores of line retrieval: what a set of cases comes to, as figures, a table and LongEval's files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from agentic_ring.files import replacing
from agentic_ring.tables import TextTable
from evals.common.intervals import Interval, mean_interval, wilson_interval
from evals.common.results import Figure
from evals.common.rows import write_rows
from evals.lines.prediction_log import Prediction

Rule = Literal["last", "first"]

UNPARSABLE = -1
"""What LongChat takes an answer without any number for; no line holds it."""

MOST_DIGITS = 100
"""Python refuses to convert a number of thousands of digits, and a model may well write one."""


def parsed_number(answer: str, rule: Rule) -> int:
    """The number that an answer is taken for.

    LongChat takes the last; other versions of the test the first. They differ where an answer repeats
    the question ("line 17 is <4242>") or goes on after it.
    """
    numbers = re.findall(r"\d+", answer)
    if not numbers:
        return UNPARSABLE
    return int(numbers[-1 if rule == "last" else 0][:MOST_DIGITS])


@dataclass(frozen=True)
class SetScore:
    """The predictions for one set of cases, all of it.

    Attributes:
      name: of the set, such as ``4k``.
      num_lines: of its documents, on average.
      predictions: in the order of the cases.
    """

    name: str
    num_lines: float
    predictions: Sequence[Prediction]

    @property
    def answered(self) -> list[Prediction]:
        """Those without an error; all scores are over these."""
        return [row for row in self.predictions if row.error is None]

    @property
    def failed(self) -> int:
        """Questions without an answer, because of an error."""
        return len(self.predictions) - len(self.answered)

    @property
    def unparsable(self) -> int:
        """Answers without any number; they count as wrong."""
        return sum(row.last == UNPARSABLE for row in self.answered)

    @property
    def with_duplicates(self) -> int:
        """Questions whose number other lines hold too, so that the wrong line may give the right answer."""
        return sum(row.value_duplicates > 0 for row in self.predictions)

    @property
    def prompt_tokens(self) -> float:
        """Of a prompt, on average."""
        return float(np.mean([row.prompt_tokens for row in self.predictions]))

    @property
    def seconds(self) -> Interval:
        """Of an answer; there must be one."""
        return mean_interval([row.seconds for row in self.answered])

    def right(self, rule: Rule) -> list[bool]:
        """Of each answer whether it is right."""
        return [(row.last if rule == "last" else row.first) == row.expected for row in self.answered]

    def accuracy(self, rule: Rule) -> Interval:
        """Share of right answers with Wilson's interval; there must be an answer."""
        right = self.right(rule)
        return wilson_interval(sum(right), len(right))

    def figures(self, rule: Rule) -> list[Figure]:
        """For ``results.json``; ``accuracy`` is by this rule, and without answers there is none."""

        def count(name: str, value: float, unit: str) -> Figure:
            return Figure(f"{name}/{self.name}", value, unit, n=len(self.predictions))

        scores = []
        if self.answered:
            rules: dict[str, Rule] = {"accuracy": rule, "accuracy_last": "last", "accuracy_first": "first"}
            scores = [
                Figure.of(f"{name}/{self.name}", self.accuracy(by), "share right")
                for name, by in rules.items()
            ]
            scores.append(Figure.of(f"seconds_per_question/{self.name}", self.seconds, "s"))
        return [
            *scores,
            count("unparsable", self.unparsable, "answers"),
            count("failed", self.failed, "questions"),
            count("value_duplicates", self.with_duplicates, "questions"),
            count("prompt_tokens", self.prompt_tokens, "tokens"),
            count("lines", self.num_lines, "lines"),
        ]


def score_table(scores: Sequence[SetScore], rule: Rule, title: str) -> TextTable:
    """A row a set."""
    other: Rule = "first" if rule == "last" else "last"
    rows = []
    for score in scores:
        if score.answered:
            accuracy, by_other = score.accuracy(rule), f"{score.accuracy(other).value:.3f}"
            shown, seconds = _with_interval(accuracy), f"{score.seconds.value:.3g}"
        else:
            shown, by_other, seconds = "none", "", ""
        rows.append(
            {
                "cases": score.name,
                "lines": f"{score.num_lines:,.0f}",
                "tokens": f"{score.prompt_tokens:,.0f}",
                f"right by {rule} number (95%)": shown,
                f"by {other}": by_other,
                "n": str(len(score.answered)),
                "unparsable": str(score.unparsable),
                "failed": str(score.failed),
                "duplicates": str(score.with_duplicates),
                "s a question": seconds,
            }
        )
    return TextTable(title, rows)


def write_summary(path: Path, scores: Sequence[SetScore], rule: Rule) -> None:
    """A CSV with the columns of RULER's summary (Tasks, Score in percent, Nulls) and ours behind them."""
    rows = []
    for score in scores:
        row = {
            "Tasks": f"lines_{score.name}",
            "Score": "",
            "Nulls": f"{score.unparsable}/{len(score.answered)}",
        }
        if score.answered:
            accuracy = score.accuracy(rule)
            row |= {"Score": _percent(accuracy.value), "Low": _percent(accuracy.low)}
            row |= {"High": _percent(accuracy.high), "Last": _percent(score.accuracy("last").value)}
            row |= {"First": _percent(score.accuracy("first").value)}
            row |= {"Seconds per question": f"{score.seconds.value:.4g}"}
        row |= {"Failed": str(score.failed), "Duplicates": str(score.with_duplicates)}
        row |= {"Lines": f"{score.num_lines:.1f}", "Prompt tokens": f"{score.prompt_tokens:.1f}"}
        rows.append(row)
    write_rows(path, rows)


def write_responses(path: Path, score: SetScore, rule: Rule) -> None:
    """The answers as LongEval writes them, a line each, and their accuracy in the last line."""
    lines = []
    for row in score.answered:
        parsed = row.last if rule == "last" else row.first
        text = f"Label: {row.expected}, Predict: {row.text}, Parsed: {parsed}"
        lines.append(" ".join(f"{text}, prompt length: {row.prompt_tokens}".splitlines()) + "\n")
    if score.answered:
        lines.append(f"Accuracy: {score.accuracy(rule).value}")
    with replacing(path) as beside:
        beside.write_text("".join(lines), encoding="utf-8")


def _with_interval(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
