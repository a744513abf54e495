"""Records with questions: LongChat's line retrieval, and the longest record whose prompts fit a context.

All strings are exactly those of DachengLi1/LongChat (longeval/utils.py). One document, which is the header
and its lines, serves many questions, so that a model reads it only once.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentic_ring.errors import ArgumentError, ConfigError
from evals.retrieval.keys import START_OF_VALUE, KeyKind, line_keys

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and "
    "contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, "
    "memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve "
    "the corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
QUESTION_START = "\nNow the record is over."
LARGEST_VALUE = 50_000

CountTokens = Callable[[str, str], int]
"""(document, question) -> tokens of the whole prompt, including the model's template."""


def line_text(key: str | int, value: int | str) -> str:
    """A line of the record."""
    return f"line {key}{START_OF_VALUE}{value}>\n"


def question_text(key: str | int) -> str:
    """The question, which follows the record."""
    return f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number."


@dataclass(frozen=True)
class Question:
    """A question about a record.

    Attributes:
      task: name of the task, see ``tasks.TASKS``.
      text: the text that follows the record.
      expected: what the task's score compares an answer with; for ``line``, the number.
      depth: position, divided by the number of lines, of the first line that is needed; in [0, 1).
      key: key of the requested line; this and what follows are known only for line retrieval.
      position: position of that line, from 0.
      value_duplicates: how many other lines have the same number.
    """

    task: str
    text: str
    expected: tuple[str, ...]
    depth: float
    key: str | int | None = None
    position: int | None = None
    value_duplicates: int | None = None


@dataclass(frozen=True)
class Document:
    """A record and the questions about it.

    Attributes:
      text: header and lines, or JSON; a prompt is this text and that of a question.
      num_lines: number of lines, or of pairs of JSON.
      seed: seed of the record; None if a file that it was read from has none.
    """

    text: str
    num_lines: int
    questions: tuple[Question, ...]
    seed: int | None = None


@dataclass(frozen=True)
class LinePlan:
    """Everything that determines a document of line retrieval, except its number of lines.

    Attributes:
      kind: kind of keys.
      name: name of the document's set, such as ``4k``; each set has other lines.
      number: number of the document within the set.
      strata: stratum of depth of each question; there are ``num_strata`` equal strata over [0, 1).
    """

    kind: KeyKind
    name: str
    seed: int
    number: int
    strata: tuple[int, ...]
    num_strata: int

    @property
    def least(self) -> int:
        """Least number of lines."""
        return len(self.strata)

    def build(self, num_lines: int) -> Document:
        """Builds the document; a longer one begins with the same lines.

        Raises:
          ArgumentError: there are fewer lines than questions.
        """
        if num_lines < len(self.strata):
            raise ArgumentError(
                f"{num_lines} lines cannot be asked {len(self.strata)} different questions; "
                "ask fewer questions per document, or make it longer"
            )
        keys = line_keys(self.kind, num_lines, self._generator("keys"))
        draw = self._generator("values")
        values = [draw.randint(1, LARGEST_VALUE) for _ in range(num_lines)]
        text = HEADER + "".join(map(line_text, keys, values))
        pick = self._generator("positions")
        positions = [self._position(stratum, num_lines, pick.random()) for stratum in self.strata]
        questions = tuple(
            line_question(
                question_text(keys[at]), keys[at], at, num_lines, values[at], values.count(values[at])
            )
            for at in positions
        )
        return Document(text, num_lines, questions, self.seed)

    def _position(self, stratum: int, num_lines: int, share: float) -> int:
        """A line of the stratum; if strata are narrower than lines, the line in which the stratum begins."""
        start = stratum * num_lines // self.num_strata
        end = max(start + 1, (stratum + 1) * num_lines // self.num_strata)
        return start + int(share * (end - start))

    def _generator(self, purpose: str) -> random.Random:
        return random.Random(f"{self.kind}/{self.name}/{self.seed}/{self.number}/{purpose}")


def line_question(
    text: str, key: str | int, position: int, num_lines: int, number: int, occurrences: int
) -> Question:
    """The question for the number in a line; ``occurrences`` is how many lines have this number."""
    return Question("line", text, (str(number),), position / num_lines, key, position, occurrences - 1)


def plan_lines(
    kind: KeyKind, name: str, seed: int, num_samples: int, questions_per_document: int
) -> list[LinePlan]:
    """Plans documents for ``num_samples`` questions; the last documents may have one question fewer.

    Question i is about stratum i of depth. Adjacent strata go to different documents, so that the questions
    of each document cover its whole depth.

    Raises:
      ConfigError: there would be no questions.
    """
    if num_samples < 1 or questions_per_document < 1:
        raise ConfigError(
            f"num_samples is {num_samples} and questions_per_document {questions_per_document}; "
            "both must be at least 1"
        )
    documents = -(-num_samples // questions_per_document)
    return [
        LinePlan(kind, name, seed, number, tuple(range(number, num_samples, documents)), num_samples)
        for number in range(documents)
    ]


class Plan(Protocol):
    """Builds a document of any number of lines from ``least`` on; many more lines have more tokens."""

    @property
    def least(self) -> int:
        """Least number of lines."""
        ...

    def build(self, num_lines: int) -> Document:
        """Builds the document."""
        ...


def longest_document(plan: Plan, room: int, count_tokens: CountTokens) -> Document:
    """The longest document of a plan whose prompts all fit into ``room`` tokens.

    The longest prompt is that of the question with the most tokens. The search counts only a few documents,
    as it extrapolates from each count to the next candidate.

    Args:
      plan: everything about the document but its number of lines.
      room: tokens for the prompt: the context minus the tokens of an answer.
      count_tokens: counts tokens as the model does.

    Raises:
      ConfigError: not even one line for each question fits.
      ArgumentError: the count does not grow with the number of lines.
    """

    def tokens(num_lines: int) -> int:
        document = plan.build(num_lines)
        questions = (question.text for question in document.questions)
        return count_tokens(document.text, max(questions, key=lambda text: count_tokens("", text)))

    def tokens_per_line(num_lines: int, counted: int) -> float:
        """At least 1: a few lines more can have fewer tokens where each number of lines has other lines."""
        return max(1.0, (counted - needed) / (num_lines - least))

    least = fits = plan.least
    needed = tokens(least)
    if needed > room:
        raise ConfigError(
            f"{needed} tokens are needed for {fits} lines and a question, and {room} are left for a prompt; "
            "give a longer context, fewer --max-new-tokens, or fewer questions about a record"
        )
    counted = tokens(least + 100)
    if counted <= needed:
        raise ArgumentError(
            f"{least + 100} lines are counted as {counted} tokens, no more than {least} lines"
        )
    guess = least + int((room - needed) / tokens_per_line(least + 100, counted))
    too_many: int | None = None
    while too_many is None or too_many - fits > 1:
        tried = max(guess, fits + 1) if too_many is None else min(max(guess, fits + 1), too_many - 1)
        counted = tokens(tried)
        if counted <= room:
            fits = tried
        else:
            too_many = tried
        guess = tried + int((room - counted) // tokens_per_line(tried, counted))
    return plan.build(fits)
