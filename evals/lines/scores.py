"""Scores of line retrieval: judges each answer; gives accuracy as figures, a table and LongEval's files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from agentic_ring.files.atomic import replacing
from agentic_ring.results.intervals import Interval, mean_interval, wilson_interval
from agentic_ring.results.results_file import Figure
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal.tables import TextTable
from evals.lines.prediction_log import Prediction
from evals.lines.prices import Prices

Rule = Literal["last", "first"]

UNPARSABLE = -1
"""The number of an answer that contains none, as in LongChat; no line has this value."""

MOST_DIGITS = 100
"""Digits that are parsed: Python refuses to convert thousands of them, and a model may write that many."""


def parsed_number(answer: str, rule: Rule) -> int:
    """The number that counts as the answer: the last one in the text, or the first one.

    LongChat takes the last; other versions of the test take the first. They differ if an answer repeats
    the question ("line 17 is <4242>") or continues after it.
    """
    numbers = re.findall(r"\d+", answer)
    if not numbers:
        return UNPARSABLE
    return int(numbers[-1 if rule == "last" else 0][:MOST_DIGITS])


@dataclass(frozen=True)
class SetScore:
    """Scores of one set of cases whose questions have all been asked.

    Attributes:
      name: name of the set, such as ``4k``.
      num_lines: average number of lines of its documents.
      predictions: one for each case, in their order.
    """

    name: str
    num_lines: float
    predictions: Sequence[Prediction]

    @property
    def answered(self) -> list[Prediction]:
        """Predictions without an error and with an end; all scores are over these."""
        return [row for row in self.predictions if row.error is None and row.unfinished is None]

    @property
    def failed(self) -> int:
        """Number of questions without an answer because of an error."""
        return sum(row.error is not None for row in self.predictions)

    @property
    def unfinished(self) -> int:
        """Number of answers that were cut off before their end."""
        return sum(row.unfinished is not None for row in self.predictions)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of all prompts that a server had read before; None if it never said."""
        cached = [row.cached_tokens for row in self.predictions if row.cached_tokens is not None]
        return sum(cached) if cached else None

    def cost(self, prices: Prices) -> float:
        """Price of all requests that were answered."""
        rows = [row for row in self.predictions if row.error is None]
        return sum(
            prices.cost(row.prompt_tokens, row.cached_tokens or 0, row.answer_tokens or 0) for row in rows
        )

    @property
    def unparsable(self) -> int:
        """Number of answers without a number; they count as wrong."""
        return sum(row.last == UNPARSABLE for row in self.answered)

    @property
    def with_duplicates(self) -> int:
        """Questions whose value occurs in other lines too."""
        return sum(row.value_duplicates > 0 for row in self.predictions)

    @property
    def prompt_tokens(self) -> float:
        """Average tokens of a prompt."""
        return float(np.mean([row.prompt_tokens for row in self.predictions]))

    @property
    def seconds(self) -> Interval:
        """Mean seconds per answer; at least one answer is needed."""
        return mean_interval([row.seconds for row in self.answered])

    @property
    def reading_seconds(self) -> float | None:
        """Mean seconds to read a document; None if it is not known apart from the first answer."""
        reading = [row.reading_seconds for row in self.answered if row.reading_seconds is not None]
        return float(np.mean(reading)) if reading else None

    def right(self, rule: Rule) -> list[bool]:
        """Whether each answer is right."""
        return [(row.last if rule == "last" else row.first) == row.expected for row in self.answered]

    def accuracy(self, rule: Rule) -> Interval:
        """Share of right answers with Wilson's interval; at least one answer is needed."""
        right = self.right(rule)
        return wilson_interval(sum(right), len(right))

    def figures(self, rule: Rule, prices: Prices | None = None) -> list[Figure]:
        """Figures for ``results.json``; ``accuracy`` follows ``rule`` and is absent without answers."""

        def count(name: str, value: float, unit: str) -> Figure:
            return Figure(f"{name}/{self.name}", value, unit, n=len(self.predictions))

        scores = []
        if self.answered:
            rules: dict[str, Rule] = {"accuracy": rule, "accuracy_last": "last", "accuracy_first": "first"}
            scores = [
                Figure.from_interval(f"{name}/{self.name}", self.accuracy(by), "share right")
                for name, by in rules.items()
            ]
            scores.append(Figure.from_interval(f"seconds_per_question/{self.name}", self.seconds, "s"))
        return [
            *scores,
            count("unparsable", self.unparsable, "answers"),
            *([] if self.reading_seconds is None else [count("reading_seconds", self.reading_seconds, "s")]),
            count("failed", self.failed, "questions"),
            count("unfinished", self.unfinished, "answers"),
            *([] if self.cached_tokens is None else [count("cached_tokens", self.cached_tokens, "tokens")]),
            *([] if prices is None else [count("cost", self.cost(prices), "price")]),
            count("value_duplicates", self.with_duplicates, "questions"),
            count("prompt_tokens", self.prompt_tokens, "tokens"),
            count("lines", self.num_lines, "lines"),
        ]


def score_table(
    scores: Sequence[SetScore], rule: Rule, title: str, prices: Prices | None = None
) -> TextTable:
    """Table with a row for each set; with cached tokens and cost where they are known."""
    cached_known = any(score.cached_tokens is not None for score in scores)
    reading_known = any(score.reading_seconds is not None for score in scores)
    other: Rule = "first" if rule == "last" else "last"
    rows = []
    for score in scores:
        if score.answered:
            accuracy, by_other = score.accuracy(rule), f"{score.accuracy(other).value:.3f}"
            shown, seconds = _with_interval(accuracy), f"{score.seconds.value:.3g}"
        else:
            shown, by_other, seconds = "none", "", ""
        sums = {}
        if reading_known:
            sums["reading, s"] = f"{score.reading_seconds or 0.0:.3g}"
        if cached_known:
            sums["cached"] = f"{(score.cached_tokens or 0) / len(score.predictions):,.0f}"
        if prices is not None:
            sums["cost"] = f"{score.cost(prices):,.4f}"
        rows.append(
            {
                "cases": score.name,
                "lines": f"{score.num_lines:,.0f}",
                "tokens": f"{score.prompt_tokens:,.0f}",
                f"accuracy, {rule} number (95%)": shown,
                f"{other} number": by_other,
                "n": str(len(score.answered)),
                "no number": str(score.unparsable),
                "failed": str(score.failed),
                "unfinished": str(score.unfinished),
                "duplicates": str(score.with_duplicates),
                "s/question": seconds,
                **sums,
            }
        )
    return TextTable(title, rows)


def write_summary(path: Path, scores: Sequence[SetScore], rule: Rule) -> None:
    """Writes a CSV with the columns of RULER's summary (Tasks, Score in percent, Nulls), then our own."""
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
        if score.reading_seconds is not None:
            row |= {"Reading seconds": f"{score.reading_seconds:.4g}"}
        row |= {"Failed": str(score.failed), "Unfinished": str(score.unfinished)}
        row |= {"Duplicates": str(score.with_duplicates)}
        row |= {"Lines": f"{score.num_lines:.1f}", "Prompt tokens": f"{score.prompt_tokens:.1f}"}
        rows.append(row)
    write_rows(path, rows)


def write_responses(path: Path, score: SetScore, rule: Rule) -> None:
    """Writes the answers in LongEval's format, one per line, with the accuracy in the last line."""
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
