"""Scores of one set of questions, and what it costs at a server's prices, before it is asked and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agentic_ring.errors import ConfigError
from agentic_ring.results.intervals import Interval, mean_interval, wilson_interval
from agentic_ring.terminal.tables import TextTable
from evals.retrieval.answers import Prediction
from evals.retrieval.tasks import UNPARSABLE, Rule

ALL = "all tasks"


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens of prompts, of those that a server had read before, and of answers.

    Raises:
      ConfigError: a price is negative or no number.
    """

    prompt: float
    cached: float
    answer: float

    def __post_init__(self) -> None:
        for name, price in vars(self).items():
            if not 0 <= price < float("inf"):
                raise ConfigError(f"the price of {name} tokens is {price}; give a number from 0 on")

    def cost(self, prompt_tokens: float, cached_tokens: float, answer_tokens: float) -> float:
        """The price of requests with so many tokens in all; cached ones are among those of the prompts."""
        read = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * self.cached
        return (read + answer_tokens * self.answer) / 1e6


class Forecast(NamedTuple):
    """What a set of cases will ask of a server: questions without an answer, tokens of all their prompts.

    ``repeated_tokens`` are those in documents that an earlier question has sent, ``answer_tokens`` the most
    that the answers may have.
    """

    requests: int
    prompt_tokens: int
    repeated_tokens: int
    answer_tokens: int


def forecast_table(forecasts: Mapping[str, Forecast], prices: Prices | None) -> TextTable:
    """Requests, tokens and, given prices, cost of each set and of all."""
    total = Forecast(*map(sum, zip(*forecasts.values(), strict=True)))
    columns = ("requests", "prompt tokens", "of them sent before", "answer tokens, at most")
    rows = []
    for name, each in {**forecasts, "all": total}.items():
        row = {"cases": name} | {column: f"{count:,}" for column, count in zip(columns, each, strict=True)}
        if prices is not None:
            for column, cached in (("cost without a cache", 0), ("with one", each.repeated_tokens)):
                row[column] = f"{prices.cost(each.prompt_tokens, cached, each.answer_tokens):,.2f}"
        rows.append(row)
    return TextTable("requests that this run would send", rows)


@dataclass(frozen=True)
class SetScore:
    """Scores of one set whose questions have all been asked.

    Attributes:
      name: name of the set, such as ``4k``.
      num_lines: average number of lines of its documents.
      predictions: one for each question, in their order.
    """

    name: str
    num_lines: float
    predictions: Sequence[Prediction]

    def answered(self, task: str = ALL) -> list[Prediction]:
        """Answers without an error and with an end, of one task or of all; scores are over these."""
        rows = (row for row in self.predictions if row.error is None and row.unfinished is None)
        return [row for row in rows if task in (ALL, row.task)]

    def score(self, task: str = ALL) -> Interval | None:
        """Mean score of a task, or of all; None without an answer.

        The interval is Wilson's for as many right answers as the scores add up to: scores in [0, 1] vary
        at most as much as right and wrong answers with the same mean.
        """
        scores = [row.score for row in self.answered(task)]
        return wilson_interval(sum(scores), len(scores)) if scores else None

    def right(self, rule: Rule) -> list[bool]:
        """Whether the number in each answer is right."""
        return [row.parsed(rule) == int(row.expected[0]) for row in self.answered()]

    def accuracy(self, rule: Rule) -> Interval:
        """Share of right numbers with Wilson's interval; at least one answer is needed."""
        right = self.right(rule)
        return wilson_interval(sum(right), len(right))

    @property
    def failed(self) -> int:
        """Number of questions without an answer because of an error."""
        return sum(row.error is not None for row in self.predictions)

    @property
    def unfinished(self) -> int:
        """Number of answers that were cut off before their end."""
        return sum(row.unfinished is not None for row in self.predictions)

    @property
    def unparsable(self) -> int:
        """Number of answers without a number; they count as wrong."""
        return sum(row.parsed("last") == UNPARSABLE for row in self.answered())

    @property
    def with_duplicates(self) -> int:
        """Questions whose value occurs in other lines too."""
        return sum((row.value_duplicates or 0) > 0 for row in self.predictions)

    @property
    def prompt_tokens(self) -> float:
        """Average tokens of a prompt."""
        return float(np.mean([row.prompt_tokens for row in self.predictions]))

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of all prompts that a server had read before; None if it never said."""
        cached = [row.cached_tokens for row in self.predictions if row.cached_tokens is not None]
        return sum(cached) if cached else None

    @property
    def seconds(self) -> Interval:
        """Mean seconds per answer; at least one answer is needed."""
        return mean_interval([row.seconds for row in self.answered()])

    @property
    def reading_seconds(self) -> float | None:
        """Mean seconds to read a document; None if it is not known apart from the first answer."""
        reading = [row.reading_seconds for row in self.answered() if row.reading_seconds is not None]
        return float(np.mean(reading)) if reading else None

    def cost(self, prices: Prices) -> float:
        """Price of all requests that were answered."""
        rows = [row for row in self.predictions if row.error is None]
        return sum(
            prices.cost(row.prompt_tokens, row.cached_tokens or 0, row.answer_tokens or 0) for row in rows
        )
