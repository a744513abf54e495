"""Line retrieval as LongChat asks it: a record of lines, and questions for the number in one of them.

The strings are those of DachengLi1/LongChat (longeval/utils.py), to the letter. A document, which is
the header and its lines, serves many questions, so that a model needs to read it only once.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentic_ring.errors import ArgumentError, ConfigError
from evals.lines.keys import KeyKind, line_keys

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and "
    "contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, "
    "memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve "
    "the corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
QUESTION_START = "\nNow the record is over."
LARGEST_VALUE = 50_000

CountTokens = Callable[[str, str], int]
"""(document, question) -> tokens of the whole prompt, as a model reads it."""


def line_text(key: str | int, value: int) -> str:
    """One line of the record."""
    return f"line {key}: REGISTER_CONTENT is <{value}>\n"


def question_text(key: str | int) -> str:
    """What follows the record."""
    return f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number."


@dataclass(frozen=True)
class LineQuestion:
    """A question for the number in one line.

    Attributes:
      text: what follows the record.
      key: of the line.
      position: of the line, from 0.
      depth: the position as a share of all lines, in [0, 1).
      expected: the number.
      value_duplicates: other lines with the same number.
    """

    text: str
    key: str | int
    position: int
    depth: float
    expected: int
    value_duplicates: int


@dataclass(frozen=True)
class LineDocument:
    """A record of lines and the questions about it.

    Attributes:
      text: header and lines; a prompt is this and a question's text.
      num_lines: in the record.
      seed: that it was drawn with, or None where it was not drawn here.
    """

    text: str
    num_lines: int
    questions: tuple[LineQuestion, ...]
    seed: int | None


@dataclass(frozen=True)
class DocumentPlan:
    """All that decides a document but its number of lines.

    Attributes:
      kind: of keys.
      name: of the set that it belongs to, such as ``4k``: other sets have other lines.
      number: of the document within the set.
      strata: for each of its questions the stratum of depth, of ``num_strata`` equal ones over [0, 1).
    """

    kind: KeyKind
    name: str
    seed: int
    number: int
    strata: tuple[int, ...]
    num_strata: int

    def build(self, num_lines: int) -> LineDocument:
        """The document with so many lines; with one line more it has the same lines and that one.

        Raises:
          ArgumentError: fewer lines than questions.
        """
        if num_lines < len(self.strata):
            raise ArgumentError(
                f"{num_lines} lines cannot be asked {len(self.strata)} different questions; "
                "ask fewer questions of a document, or make it longer"
            )
        keys = line_keys(self.kind, num_lines, self._generator("keys"))
        draw = self._generator("values")
        values = [draw.randint(1, LARGEST_VALUE) for _ in range(num_lines)]
        text = HEADER + "".join(map(line_text, keys, values))
        pick = self._generator("positions")
        questions = tuple(
            _question(keys[position], position, values)
            for position in (self._position(stratum, num_lines, pick.random()) for stratum in self.strata)
        )
        return LineDocument(text, num_lines, questions, self.seed)

    def _position(self, stratum: int, num_lines: int, share: float) -> int:
        """A line of the stratum; where strata are narrower than lines, the line that it begins in."""
        start = stratum * num_lines // self.num_strata
        end = max(start + 1, (stratum + 1) * num_lines // self.num_strata)
        return start + int(share * (end - start))

    def _generator(self, purpose: str) -> random.Random:
        return random.Random(f"{self.kind}/{self.name}/{self.seed}/{self.number}/{purpose}")


def _question(key: str | int, position: int, values: Sequence[int]) -> LineQuestion:
    expected = values[position]
    depth = position / len(values)
    return LineQuestion(question_text(key), key, position, depth, expected, values.count(expected) - 1)


def plan_documents(
    kind: KeyKind, name: str, seed: int, num_samples: int, questions_per_document: int
) -> list[DocumentPlan]:
    """Documents for ``num_samples`` questions; the last of them may be asked one fewer.

    Question i is about stratum i of depth; neighbouring strata go to different documents, so that each
    document is asked from its beginning to its end.

    Raises:
      ConfigError: no questions.
    """
    if num_samples < 1 or questions_per_document < 1:
        raise ConfigError(
            f"num_samples is {num_samples} and questions_per_document {questions_per_document}; "
            "both must be at least 1"
        )
    documents = -(-num_samples // questions_per_document)
    return [
        DocumentPlan(kind, name, seed, number, tuple(range(number, num_samples, documents)), num_samples)
        for number in range(documents)
    ]


def longest_document(plan: DocumentPlan, room: int, count_tokens: CountTokens) -> LineDocument:
    """The document whose longest prompt fits into ``room`` tokens, while with one line more it does not.

    The longest prompt is that of the question with the most tokens of its own. A document is counted a
    few times only: each count tells how far off the next one should be taken.

    Args:
      plan: the rest of the document.
      room: tokens for the prompt, which is the context less what may be generated.
      count_tokens: the model's own.

    Raises:
      ConfigError: not even a line for each question fits.
      ArgumentError: more lines do not count as more tokens.
    """

    def tokens(num_lines: int) -> int:
        document = plan.build(num_lines)
        questions = (question.text for question in document.questions)
        return count_tokens(document.text, max(questions, key=lambda text: count_tokens("", text)))

    def tokens_a_line(num_lines: int, counted: int) -> float:
        if counted <= needed:
            raise ArgumentError(f"{num_lines} lines are counted as {counted} tokens, as few lines are")
        return (counted - needed) / (num_lines - least)

    least = fits = len(plan.strata)
    needed = tokens(least)
    if needed > room:
        raise ConfigError(
            f"{needed} tokens are needed for {fits} lines and a question, and {room} are left for a prompt; "
            "give a longer context, fewer --questions-per-document or fewer --max-new-tokens"
        )
    guess = least + int((room - needed) / tokens_a_line(least + 100, tokens(least + 100)))
    too_many: int | None = None
    while too_many is None or too_many - fits > 1:
        tried = max(guess, fits + 1) if too_many is None else min(max(guess, fits + 1), too_many - 1)
        counted = tokens(tried)
        if counted <= room:
            fits = tried
        else:
            too_many = tried
        guess = tried + int((room - counted) // tokens_a_line(tried, counted))
    return plan.build(fits)
