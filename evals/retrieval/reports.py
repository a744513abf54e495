"""The reports of line retrieval and of the ladder: figures, a table, files for other tools, and plots."""

import json
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, NullLocator

from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.results.results_file import Figure
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import parse_tokens, short_tokens
from evals.plots import BLUE, ORANGE, draw_intervals, save, titled_canvas
from evals.retrieval.answers import ALL, Prediction, Prices, SetScore
from evals.retrieval.tasks import TASKS, Rule

REFERENCE = "4k"
"""Length whose score the effective length is measured against."""
KEPT = 0.85
"""Share of that score that the lower end of the interval must stay above."""
DEPTH_BINS = 5
PARTNER_BINS = {"none": 1, "1 to 3": 4, "4 to 15": 16, "16 to 63": 64, "64 to 127": 128, "128 or more": None}
"""Labels of numbers of lines that share a word with a key, and the number at which the next bin begins."""
MISSES_TO_HITS = LinearSegmentedColormap.from_list("misses to hits", [ORANGE, "#F7F7F7", BLUE])


@dataclass(frozen=True)
class LineReport:
    """What ``evals/line_retrieval.py`` shows: scores of the number that ``rule`` selects, and cost."""

    rule: Rule = "last"
    prices: Prices | None = None
    title = "line retrieval"

    @property
    def settings(self) -> dict[str, str]:
        """Settings that stand in ``results.json`` beside those of the run."""
        return {"score": self.rule}

    def figures(self, scores: Sequence[SetScore]) -> list[Figure]:
        """Figures for ``results.json``; ``accuracy`` follows the rule and is absent without answers."""
        found = []
        for score in scores:
            if score.answered():
                for name, interval, unit in (
                    ("accuracy", score.accuracy(self.rule), "share right"),
                    ("accuracy_last", score.accuracy("last"), "share right"),
                    ("accuracy_first", score.accuracy("first"), "share right"),
                    ("seconds_per_question", score.seconds, "s"),
                ):
                    found.append(Figure.from_interval(f"{name}/{score.name}", interval, unit))
            counts = (
                ("unparsable", score.unparsable, "answers"),
                ("reading_seconds", score.reading_seconds, "s"),
                ("failed", score.failed, "questions"),
                ("unfinished", score.unfinished, "answers"),
                ("cached_tokens", score.cached_tokens, "tokens"),
                ("cost", self.prices and score.cost(self.prices), "price"),
                ("value_duplicates", score.with_duplicates, "questions"),
                ("prompt_tokens", score.prompt_tokens, "tokens"),
                ("lines", score.num_lines, "lines"),
            )
            found += [
                Figure(f"{name}/{score.name}", value, unit, n=len(score.predictions))
                for name, value, unit in counts
                if value is not None
            ]
        return found

    def table(self, scores: Sequence[SetScore], title: str) -> TextTable:
        """Table with a row for each set; with cached tokens and cost where they are known."""
        cached_known = any(score.cached_tokens is not None for score in scores)
        reading_known = any(score.reading_seconds is not None for score in scores)
        other: Rule = "first" if self.rule == "last" else "last"
        rows = []
        for score in scores:
            answered = score.answered()
            accuracy = f"{score.accuracy(self.rule):.3f}" if answered else "none"
            row = {
                "cases": score.name,
                "lines": f"{score.num_lines:,.0f}",
                "tokens": f"{score.prompt_tokens:,.0f}",
                f"accuracy, {self.rule} number (95%)": accuracy,
                f"{other} number": f"{score.accuracy(other).value:.3f}" if answered else "",
                "n": str(len(answered)),
                "no number": str(score.unparsable),
                "failed": str(score.failed),
                "unfinished": str(score.unfinished),
                "duplicates": str(score.with_duplicates),
                "s/question": f"{score.seconds.value:.3g}" if answered else "",
            }
            if reading_known:
                row["reading, s"] = f"{score.reading_seconds or 0.0:.3g}"
            if cached_known:
                row["cached"] = f"{(score.cached_tokens or 0) / len(score.predictions):,.0f}"
            if self.prices is not None:
                row["cost"] = f"{score.cost(self.prices):,.4f}"
            rows.append(row)
        return TextTable(title, rows)

    def write(self, directory: Path, name: str, scores: Sequence[SetScore]) -> None:
        """Writes answers in LongEval's format, a summary and plots.

        The summary has the columns of RULER's (Tasks, Score in percent, Nulls), then our own.
        """
        rows = []
        for score in scores:
            write_responses(directory / "predictions" / f"{score.name}_response.txt", score, self.rule)
            nulls = f"{score.unparsable}/{len(score.answered())}"
            row = {"Tasks": f"lines_{score.name}", "Score": "", "Nulls": nulls}
            if score.answered():
                accuracy = score.accuracy(self.rule)
                last, first = score.accuracy("last").value, score.accuracy("first").value
                shares = {"Score": accuracy.value, "Low": accuracy.low, "High": accuracy.high}
                shares |= {"Last": last, "First": first}
                row |= {column: f"{100 * (share or 0.0):.2f}" for column, share in shares.items()}
                row |= {"Seconds per question": f"{score.seconds.value:.4g}"}
            if score.reading_seconds is not None:
                row |= {"Reading seconds": f"{score.reading_seconds:.4g}"}
            row |= {"Failed": str(score.failed), "Unfinished": str(score.unfinished)}
            row |= {"Duplicates": str(score.with_duplicates)}
            row |= {"Lines": f"{score.num_lines:.1f}", "Prompt tokens": f"{score.prompt_tokens:.1f}"}
            rows.append(row)
        write_rows(directory / "summary.csv", rows)
        answered = [score for score in scores if score.answered()]
        if answered:
            plot_accuracy(directory / "accuracy.png", name, answered, self.rule)
            plot_depths(directory / "depths.png", name, answered, self.rule)
            plot_word_partners(directory / "word_partners.png", name, answered, self.rule)


def write_responses(path: Path, score: SetScore, rule: Rule) -> None:
    """Writes the answers in LongEval's format, one per line, with the accuracy in the last line."""
    lines = []
    for row in score.answered():
        text = f"Label: {row.expected[0]}, Predict: {row.text}, Parsed: {row.parsed(rule)}"
        lines.append(" ".join(f"{text}, prompt length: {row.prompt_tokens}".splitlines()) + "\n")
    if lines:
        lines.append(f"Accuracy: {score.accuracy(rule).value}")
    with replacing(path) as beside:
        beside.write_text("".join(lines), encoding="utf-8")


@dataclass(frozen=True)
class LadderReport:
    """What ``evals/ladder.py`` shows, by task; ``ruler`` are RULER's scores from ``ruler_scores``."""

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
            unanswered = len(each.predictions) - len(each.answered())
            found.append(Figure(f"prompt_tokens/{each.name}", each.prompt_tokens, "tokens"))
            found.append(Figure(f"not_answered/{each.name}", unanswered, "questions"))
        return found

    def table(self, scores: Sequence[SetScore], title: str) -> TextTable:
        """Table with a row for each task and a column for each length; those of RULER follow."""
        names = {parse_tokens(each.name): each.name for each in scores}
        names |= {length: short_tokens(length) for by in self.ruler.values() for length in by}
        shown = {
            task: {parse_tokens(s.name): f"{found:.2f}" for s in scores if (found := s.score(task))}
            for task in _tasks(scores)
        }
        asked = {name: task.title for name, task in TASKS.items()} | dict.fromkeys(self.ruler, "RULER")
        lengths = {task: effective_length(scores, task) for task in shown}
        for task, by in self.ruler.items():
            shown[task] = {length: f"{share:.2f}" for length, share in by.items()}
        rows = [
            {
                "task": task,
                "what is asked": asked.get(task, ""),
                **{name: by.get(length, "") for length, name in sorted(names.items())},
                "effective length": lengths.get(task, ""),
            }
            for task, by in shown.items()
        ]
        note = (
            "Mean scores with 95% intervals over questions. Effective length: the longest up to which the "
            f"lower end stays above {KEPT:.0%} of the score at {REFERENCE}."
        )
        return TextTable(title, rows, [note])

    def write(self, directory: Path, name: str, scores: Sequence[SetScore]) -> None:
        """Writes a CSV with a row for each task and length, and a picture."""
        rows = [
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
        ]
        write_rows(directory / "summary.csv", rows)
        if rows:
            plot_ladder(directory / "ladder.png", name, scores)


def effective_length(scores: Sequence[SetScore], task: str = ALL) -> str:
    """The longest length, such as ``64k``, up to which the interval stays above 85% of the score at 4K.

    It is "none" if even 4K is not kept, and "" without answers at 4K.
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


def ruler_scores(path: Path) -> dict[str, dict[int, float]]:
    """The scores by length of RULER's tasks in the results of ``evals/harness.py``."""
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


def plot_accuracy(path: Path, name: str, scores: Sequence[SetScore], rule: Rule) -> None:
    """Plots the accuracy of each set, with its 95% interval, against its prompt length."""
    canvas, axes = titled_canvas(f"line retrieval: {name}")
    accuracies = [score.accuracy(rule) for score in scores]
    tokens = [score.prompt_tokens for score in scores]
    draw_intervals(axes, tokens, accuracies, color=BLUE, marker="o", capsize=4, linewidth=2)
    accuracy_axes(axes, tokens)
    axes.set_ylabel(f"accuracy ({rule} number of an answer)\nbars: 95% over questions")
    save(canvas, path)


def accuracy_axes(axes: Axes, tokens: Sequence[float]) -> None:
    """Sets up axes of accuracy against prompt tokens, with ticks at powers of two."""
    axes.set_xscale("log", base=2)
    powers = 2.0 ** np.arange(np.floor(np.log2(min(tokens))), np.ceil(np.log2(max(tokens))) + 1)
    axes.set_xticks(powers)
    axes.set_xlim(powers[0] / 1.2, powers[-1] * 1.2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_tokens(round(tokens)).upper()))
    axes.set_xlabel("prompt tokens")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def plot_depths(path: Path, name: str, scores: Sequence[SetScore], rule: Rule) -> None:
    """Plots accuracy with a column for each set and a row for each fifth of the depth: right/asked."""
    edges = [f"{100 * edge // DEPTH_BINS} to {100 * (edge + 1) // DEPTH_BINS}%" for edge in range(DEPTH_BINS)]
    title, label = f"line retrieval by depth: {name}", "depth of the line in the record"
    _plot_right(path, title, label, scores, rule, edges, lambda row: int(row.depth * DEPTH_BINS))


def plot_word_partners(path: Path, name: str, scores: Sequence[SetScore], rule: Rule) -> None:
    """Plots accuracy by set and by the number of other lines that share a word with the key: right/asked.

    Nothing is written if no question has such a number.
    """
    bins = [first for first in PARTNER_BINS.values() if first is not None]

    def group(row: Prediction) -> int | None:
        return None if row.word_partners is None else bisect(bins, row.word_partners)

    if any(group(row) is not None for score in scores for row in score.answered()):
        title = f"line retrieval by lines that share a word: {name}"
        label = "other lines with the key's adjective or noun"
        _plot_right(path, title, label, scores, rule, list(PARTNER_BINS), group)


def _plot_right(
    path: Path,
    title: str,
    row_label: str,
    scores: Sequence[SetScore],
    rule: Rule,
    rows: Sequence[str],
    group: Callable[[Prediction], int | None],
) -> None:
    """Plots right/asked with a column for each set; ``group`` is the row of a prediction, or None."""
    asked, right = np.zeros((2, len(rows), len(scores)), int)
    for column, score in enumerate(scores):
        for prediction, hit in zip(score.answered(), score.right(rule), strict=True):
            row = group(prediction)
            if row is not None:
                asked[row, column] += 1
                right[row, column] += hit
    shares = np.divide(right, asked, out=np.full(asked.shape, np.nan), where=asked > 0)
    texts = {at: f"{right[at]}/{asked[at]}" for at in np.ndindex(*shares.shape)}
    labels = {"colour": f"accuracy ({rule} number of an answer)", "x": "set of cases", "y": row_label}
    _plot_shares(path, title, shares, texts, rows, [score.name for score in scores], labels)


def plot_ladder(path: Path, name: str, scores: Sequence[SetScore]) -> None:
    """Plots the scores with a row for each task and a column for each length."""
    tasks = _tasks(scores)
    found = [[score and score.value for score in (each.score(task) for each in scores)] for task in tasks]
    shares = np.array(found, np.float64)  # without an answer, NaN
    rows = [f"{task}\n({effective_length(scores, task)})".removesuffix("\n()") for task in tasks]
    texts = {at: f"{share:.2f}" for at, share in np.ndenumerate(shares) if not np.isnan(share)}
    labels = {"colour": "mean score", "x": "length; below each task, its effective length", "y": ""}
    _plot_shares(path, f"ladder: {name}", shares, texts, rows, [score.name for score in scores], labels)


def _plot_shares(
    path: Path,
    title: str,
    shares: np.ndarray,
    texts: Mapping[tuple[int, ...], str],
    rows: Sequence[str],
    columns: Sequence[str],
    labels: Mapping[str, str],
) -> None:
    """Plots shares [rows, columns] as colours, with the text of each position."""
    canvas, axes = titled_canvas(title)
    image = axes.imshow(shares, cmap=MISSES_TO_HITS, vmin=0, vmax=1, aspect="auto")
    for (row, column), text in texts.items():
        colour = "white" if shares[row, column] > 0.8 else "black"
        axes.text(column, row, text, color=colour, ha="center", va="center")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    canvas.colorbar(image, ax=axes, label=labels["colour"])
    axes.set_xlabel(labels["x"])
    axes.set_ylabel(labels["y"])
    save(canvas, path)
