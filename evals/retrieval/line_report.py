"""The report of line retrieval: accuracy as figures, a table, LongEval's and RULER's files, and plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentic_ring.files.atomic import replacing
from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import Figure, write_rows
from agentic_ring.terminal.tables import TextTable
from evals.retrieval.plots import plot_accuracy, plot_depths, plot_word_partners
from evals.retrieval.prices import Prices
from evals.retrieval.scores import SetScore
from evals.retrieval.tasks import Rule


@dataclass(frozen=True)
class LineReport:
    """What the command shows of the scores of its sets: figures, a table, files and plots.

    Attributes:
      rule: selects the number of an answer that is scored.
      prices: prices of an endpoint's tokens; None shows no cost.
    """

    rule: Rule = "last"
    prices: Prices | None = None
    title = "line retrieval"

    @property
    def settings(self) -> dict[str, str]:
        """Settings that stand in ``results.json`` beside those of the run."""
        return {"score": self.rule}

    def figures(self, scores: Sequence[SetScore]) -> list[Figure]:
        """Figures for ``results.json``; ``accuracy`` follows the rule and is absent without answers."""
        return [figure for score in scores for figure in self._figures(score)]

    def table(self, scores: Sequence[SetScore], title: str) -> TextTable:
        """Table with a row for each set; with cached tokens and cost where they are known."""
        cached_known = any(score.cached_tokens is not None for score in scores)
        reading_known = any(score.reading_seconds is not None for score in scores)
        other: Rule = "first" if self.rule == "last" else "last"
        rows = []
        for score in scores:
            if score.answered():
                accuracy, by_other = score.accuracy(self.rule), f"{score.accuracy(other).value:.3f}"
                shown, seconds = _with_interval(accuracy), f"{score.seconds.value:.3g}"
            else:
                shown, by_other, seconds = "none", "", ""
            sums = {}
            if reading_known:
                sums["reading, s"] = f"{score.reading_seconds or 0.0:.3g}"
            if cached_known:
                sums["cached"] = f"{(score.cached_tokens or 0) / len(score.predictions):,.0f}"
            if self.prices is not None:
                sums["cost"] = f"{score.cost(self.prices):,.4f}"
            rows.append(
                {
                    "cases": score.name,
                    "lines": f"{score.num_lines:,.0f}",
                    "tokens": f"{score.prompt_tokens:,.0f}",
                    f"accuracy, {self.rule} number (95%)": shown,
                    f"{other} number": by_other,
                    "n": str(len(score.answered())),
                    "no number": str(score.unparsable),
                    "failed": str(score.failed),
                    "unfinished": str(score.unfinished),
                    "duplicates": str(score.with_duplicates),
                    "s/question": seconds,
                    **sums,
                }
            )
        return TextTable(title, rows)

    def write(self, directory: Path, name: str, scores: Sequence[SetScore]) -> None:
        """Writes answers in LongEval's format, a summary and plots.

        The summary has the columns of RULER's (Tasks, Score in percent, Nulls), then our own.
        """
        for score in scores:
            write_responses(directory / "predictions" / f"{score.name}_response.txt", score, self.rule)
        rows = []
        for score in scores:
            row = {
                "Tasks": f"lines_{score.name}",
                "Score": "",
                "Nulls": f"{score.unparsable}/{len(score.answered())}",
            }
            if score.answered():
                accuracy = score.accuracy(self.rule)
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
        write_rows(directory / "summary.csv", rows)
        if any(score.answered() for score in scores):
            plot_accuracy(directory / "accuracy.png", name, scores, self.rule)
            plot_depths(directory / "depths.png", name, scores, self.rule)
            plot_word_partners(directory / "word_partners.png", name, scores, self.rule)

    def _figures(self, score: SetScore) -> list[Figure]:
        def count(name: str, value: float, unit: str) -> Figure:
            return Figure(f"{name}/{score.name}", value, unit, n=len(score.predictions))

        found = []
        if score.answered():
            rules: dict[str, Rule] = {
                "accuracy": self.rule,
                "accuracy_last": "last",
                "accuracy_first": "first",
            }
            found = [
                Figure.from_interval(f"{name}/{score.name}", score.accuracy(by), "share right")
                for name, by in rules.items()
            ]
            found.append(Figure.from_interval(f"seconds_per_question/{score.name}", score.seconds, "s"))
        return [
            *found,
            count("unparsable", score.unparsable, "answers"),
            *(
                []
                if score.reading_seconds is None
                else [count("reading_seconds", score.reading_seconds, "s")]
            ),
            count("failed", score.failed, "questions"),
            count("unfinished", score.unfinished, "answers"),
            *([] if score.cached_tokens is None else [count("cached_tokens", score.cached_tokens, "tokens")]),
            *([] if self.prices is None else [count("cost", score.cost(self.prices), "price")]),
            count("value_duplicates", score.with_duplicates, "questions"),
            count("prompt_tokens", score.prompt_tokens, "tokens"),
            count("lines", score.num_lines, "lines"),
        ]


def write_responses(path: Path, score: SetScore, rule: Rule) -> None:
    """Writes the answers in LongEval's format, one per line, with the accuracy in the last line."""
    lines = []
    for row in score.answered():
        parsed = row.parsed(rule)
        text = f"Label: {row.expected[0]}, Predict: {row.text}, Parsed: {parsed}"
        lines.append(" ".join(f"{text}, prompt length: {row.prompt_tokens}".splitlines()) + "\n")
    if score.answered():
        lines.append(f"Accuracy: {score.accuracy(rule).value}")
    with replacing(path) as beside:
        beside.write_text("".join(lines), encoding="utf-8")


def _with_interval(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
