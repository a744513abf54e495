"""Answers to questions about documents, and their log: a row per question, on disk as soon as it is known."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pydantic

from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, read_json_rows
from evals.retrieval.documents import Document, Question, count_word_partners
from evals.retrieval.tasks import TASKS, Rule, parsed_number

Count = Annotated[int, pydantic.Field(ge=0)]
Seconds = Annotated[float, pydantic.Field(ge=0)]


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
      text: the answer, unchanged; empty after an error.
      prompt_tokens: tokens of the whole prompt, template and BOS included.
      seconds: time for this question; of an endpoint's first one, with the time to read the document.
      error: why there is no answer, or None.
      unfinished: why the answer stops before its end, or None.
      answer_tokens: tokens of the answer, with those of reasoning; None if they are not known.
      cached_tokens: tokens of the prompt that a server had read before; None if it does not say.
      reading_seconds: time to read the document before this question; None if it is not known apart.
    """

    text: str
    prompt_tokens: Count
    seconds: Seconds
    error: str | None = None
    unfinished: str | None = None
    answer_tokens: Count | None = None
    cached_tokens: Count | None = None
    reading_seconds: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction(Answer):
    """One question and its answer; a resumed run asks a question again whose answer has an ``error``.

    Attributes:
      case: number of the question, from 0, over all documents of the set.
      document: number of its document.
      task, depth, expected, key, value_duplicates: see ``Question``.
      score: score of the answer by its task, in [0, 1].
      prompt_digest: digest of the prompt, which tells the question from those of other sets.
      word_partners: how many other lines share a word with the key; None if keys are not pairs of words.
    """

    case: Count
    document: Count
    task: str
    depth: Annotated[float, pydantic.Field(ge=0, lt=1)]
    expected: tuple[str, ...]
    score: Annotated[float, pydantic.Field(ge=0, le=1)]
    prompt_digest: str
    key: str | int | None = None
    value_duplicates: Count | None = None
    word_partners: Count | None = None

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
        asked, key = self.question, str(self.question.key)
        paired = pairs_of_words and asked.key is not None and "-" in key
        return Prediction(
            **vars(answer),
            case=self.case,
            document=self.document,
            task=asked.task,
            depth=asked.depth,
            expected=asked.expected,
            score=TASKS[asked.task].score(asked.expected, answer.text),
            prompt_digest=self.digest,
            key=asked.key,
            value_duplicates=asked.value_duplicates,
            word_partners=count_word_partners(record, key) if paired else None,
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

    A later row for a question replaces an earlier one.

    Raises:
      DataError: a row is malformed, or belongs to another set. Only the last row may be incomplete, if the
        run was killed: it is dropped, and its question is asked again.
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

    @property
    def complete(self) -> bool:
        """Whether every question was asked."""
        return len(self.rows) == len(self._asked)

    @property
    def failed(self) -> int:
        """Number of questions whose answer is an error."""
        return sum(row.error is not None for row in self.rows.values())

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
