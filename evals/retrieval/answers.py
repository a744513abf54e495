"""Answers to questions about documents: their log, their scores, and their cost at a server's prices."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pydantic

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.json_files import json_row, read_json_rows
from agentic_ring.results.intervals import Interval, mean_interval, wilson_interval
from agentic_ring.terminal.tables import TextTable
from evals.retrieval.documents import Document, Question, count_word_partners
from evals.retrieval.tasks import TASKS, UNPARSABLE, Rule, parsed_number

ALL = "all tasks"

Count = Annotated[int, pydantic.Field(ge=0)]
Seconds = Annotated[float, pydantic.Field(ge=0)]


@dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    text: str
    """The answer, unchanged; empty after an error."""
    prompt_tokens: Count
    """Tokens of the whole prompt, template and BOS included."""
    seconds: Seconds
    """Time for this question; of an endpoint's first one, with the time to read the document."""
    error: str | None = None
    """Why there is no answer, or None."""
    unfinished: str | None = None
    """Why the answer stops before its end, or None."""
    answer_tokens: Count | None = None
    """Tokens of the answer, with those of reasoning; None if they are not known."""
    cached_tokens: Count | None = None
    """Tokens of the prompt that a server had read before; None if it does not say."""
    reading_seconds: Seconds | None = None
    """Time to read the document before this question; None if it is not known apart."""


@dataclass(frozen=True, kw_only=True)
class Prediction(Answer):
    """One question and its answer; for what is not described here see ``Question``."""

    case: Count
    """Number of the question over all documents of the set, from 0."""
    document: Count
    """Number of its document, from 0."""
    task: str
    depth: Annotated[float, pydantic.Field(ge=0, lt=1)]
    expected: tuple[str, ...]
    score: Annotated[float, pydantic.Field(ge=0, le=1)]
    """Score of the answer by its task."""
    prompt_digest: str
    """Tells the question from those of other sets."""
    key: str | int | None = None
    value_duplicates: Count | None = None
    word_partners: Count | None = None
    """How many other lines share a word with the key; None if keys are not pairs of words."""

    def parsed(self, rule: Rule) -> int:
        """The number in the answer that counts by a rule."""
        return parsed_number(self.text, rule)


@dataclass(frozen=True)
class AskedQuestion:
    """A question with its place in a set: see ``Prediction`` for ``case``, ``document`` and ``digest``."""

    case: int
    document: int
    question: Question
    digest: str

    def predicted(self, answer: Answer, record: str, pairs_of_words: bool) -> Prediction:
        """Scores an answer about a record, whose keys may be pairs of words."""
        asked, key = self.question, self.question.key
        partners = None
        if pairs_of_words and isinstance(key, str) and "-" in key:
            partners = count_word_partners(record, key)
        return Prediction(
            **vars(answer),
            case=self.case,
            document=self.document,
            task=asked.task,
            depth=asked.depth,
            expected=asked.expected,
            score=TASKS[asked.task].score(asked.expected, answer.text),
            prompt_digest=self.digest,
            key=key,
            value_duplicates=asked.value_duplicates,
            word_partners=partners,
        )


def asked_questions(documents: Sequence[Document]) -> list[AskedQuestion]:
    """Every question of a set, in order."""
    rows = []
    for number, document in enumerate(documents):
        for question in document.questions:
            prompt = (document.text + question.text).encode()
            digest = hashlib.blake2b(prompt, digest_size=8).hexdigest()
            rows.append(AskedQuestion(len(rows), number, question, digest))
    return rows


class PredictionLog:
    """The answers to the questions ``asked`` of a set in a file with one JSON object per line.

    A later row for a question replaces an earlier one. A row that is malformed or belongs to another set is a
    ``DataError``; only the last may be incomplete, if the run was killed: its question is asked again.
    """

    def __init__(self, path: Path, asked: Sequence[AskedQuestion]):
        self._path, self._asked = path, asked
        self.rows: dict[int, Prediction] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        remedy = "delete that line and run the same command again, which asks the question again"
        for number, row in enumerate(read_json_rows(path, Prediction, remedy), start=1):
            if row.case >= len(asked) or row.prompt_digest != asked[row.case].digest:
                raise DataError(
                    f"{path}, line {number} answers another question than case {row.case} of this set; "
                    "give another --output, or delete the file to ask again"
                )
            self.rows[row.case] = row
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def open(self, documents: Sequence[Document]) -> Iterator[tuple[Document, list[AskedQuestion]]]:
        """Each document with questions that have no answer yet, and these."""
        answered = {case for case, row in self.rows.items() if row.error is None}
        for number, document in enumerate(documents):
            left = [each for each in self._asked if each.document == number and each.case not in answered]
            if left:
                yield document, left

    def add(self, row: Prediction) -> None:
        """Appends a row; it is on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_row(asdict(row)))
            file.flush()
            os.fsync(file.fileno())
        self.rows[row.case] = row


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens of prompts, of those that a server had read before, and of answers."""

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
    """What a set of cases will ask of a server.

    ``repeated_tokens`` are those of the prompts in documents that an earlier question has sent, and
    ``answer_tokens`` the most that the answers may have.
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
    """Scores of a set such as ``4k``: the answer to each question, and the average lines of a document."""

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
        return wilson_interval(sum(scores), len(scores), "answers") if scores else None

    def right(self, rule: Rule) -> list[bool]:
        """Whether the number in each answer is right."""
        return [row.parsed(rule) == int(row.expected[0]) for row in self.answered()]

    def accuracy(self, rule: Rule) -> Interval:
        """Share of right numbers with Wilson's interval; at least one answer is needed."""
        right = self.right(rule)
        return wilson_interval(sum(right), len(right), "answers")

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
        return mean_interval([row.seconds for row in self.answered()], "answers")

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
