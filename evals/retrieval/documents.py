"""Records with questions: LongChat's line retrieval, its files, and the longest record whose prompts fit.

All strings are exactly those of DachengLi1/LongChat (longeval/utils.py). One document, which is the header
and its lines, serves many questions, so that a model reads it only once.
"""

import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args

import pydantic
from wonderwords import RandomWord

from agentic_ring.errors import ArgumentError, ConfigError, DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_fault, json_row, parse_json

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and "
    "contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, "
    "memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve "
    "the corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
START_OF_VALUE = ": REGISTER_CONTENT is <"
"""What stands between the key and the value of a line."""
QUESTION_START = "\nNow the record is over."
LARGEST_VALUE = 50_000
LONGEST_LIST_OF_PAIRS = 3_000_000
"""About half of all pairs of words; beyond it, drawing an unused pair takes ever longer."""

KeyKind = Literal["LRT", "LRT-ABCindex", "LRT-UUID", "LRT-NL"]
"""LongChat's names for numbers from 1, words of the letters A to F, UUIDs, and adjective-noun pairs."""
KINDS: tuple[KeyKind, ...] = get_args(KeyKind)

CountTokens = Callable[[str, str], int]
"""(document, question) -> tokens of the whole prompt, including the model's template."""


def line_keys(kind: KeyKind, count: int, generator: random.Random) -> Sequence[str | int]:
    """Returns ``count`` different keys.

    For the same state of the generator, a shorter list is the beginning of a longer one. Keys of letters
    are the exception: they become longer when 6, 7, ... letters no longer suffice, as in LongChat. More than
    ``LONGEST_LIST_OF_PAIRS`` pairs of words are an ``ArgumentError``.
    """
    match kind:
        case "LRT":
            return range(1, count + 1)
        case "LRT-ABCindex":
            length = next(n for n in itertools.count(6) if 6**n >= count)
            words = itertools.product("ABCDEF", repeat=length)
            return ["".join(letters) for letters in itertools.islice(words, count)]
        case "LRT-UUID":
            return [str(uuid.UUID(int=generator.getrandbits(128), version=4)) for _ in range(count)]
        case "LRT-NL":
            return _word_pairs(count, generator)


def _word_pairs(count: int, generator: random.Random) -> list[str]:
    """Draws from each word list in a random order, and reshuffles it whenever it is used up.

    No word repeats before its list is used up: up to 910 lines have LongChat's own distribution, which
    ends there. A pair that has been used before is skipped.
    """
    if count > LONGEST_LIST_OF_PAIRS:
        raise ArgumentError(
            f"{count} lines with pairs of words were requested; at most {LONGEST_LIST_OF_PAIRS} are "
            "possible. Use LRT-UUID for more"
        )

    def shuffled_forever(words: Sequence[str]) -> Iterator[str]:
        while True:
            yield from generator.sample(words, len(words))

    adjectives, nouns = map(shuffled_forever, word_lists())
    pairs: dict[str, None] = {}
    while len(pairs) < count:
        pairs[f"{next(adjectives)}-{next(nouns)}"] = None
    return list(pairs)


@cache
def word_lists() -> tuple[list[str], list[str]]:
    """The adjectives and nouns of wonderwords."""
    words = RandomWord(enhanced_prefixes=False)  # prefixes are slow to prepare and unused
    return words.filter(include_categories=["adjective"]), words.filter(include_categories=["noun"])


def count_word_partners(record: str, key: str) -> int:
    """Returns how many lines of a record, other than the key's own, share its adjective or its noun.

    Words that are the same up to a hyphen, such as "old" and "old-fashioned", count as shared. The key, of a
    line of the record, is an adjective, a hyphen (in files with other words than ours the first) and a noun.
    """
    compound = (word for word in word_lists()[0] if "-" in word and key.startswith(f"{word}-"))
    adjective = next(compound, key.partition("-")[0])
    noun = key.removeprefix(f"{adjective}-")
    return record.count(f"\nline {adjective}-") + record.count(f"-{noun}{START_OF_VALUE}") - 2


def line_text(key: str | int, value: int | str) -> str:
    """A line of the record."""
    return f"line {key}{START_OF_VALUE}{value}>\n"


def question_text(key: str | int) -> str:
    """The question, which follows the record."""
    return f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number."


@dataclass(frozen=True)
class Question:
    """A question about a record."""

    task: str
    """Name of the task, see ``tasks.TASKS``."""
    text: str
    """The text that follows the record."""
    expected: tuple[str, ...]
    """What the task's score compares an answer with; for ``line``, the number."""
    depth: float
    """Position, divided by the number of lines, of the first line that is needed; in [0, 1)."""
    key: str | int | None = None
    """Key of the requested line; this and what follows are known only for line retrieval."""
    position: int | None = None
    """Position of that line, from 0."""
    value_duplicates: int | None = None
    """How many other lines have the same number."""


@dataclass(frozen=True)
class Document:
    """A record of ``num_lines`` lines, or pairs of JSON, and the questions about it.

    A prompt is the record's ``text`` and that of a question. ``seed`` is None if a file does not say it.
    """

    text: str
    num_lines: int
    questions: tuple[Question, ...]
    seed: int | None = None


@dataclass(frozen=True)
class LinePlan:
    """Everything that determines a document of line retrieval, except its number of lines.

    It is document ``number`` of the set ``name``, such as ``4k``; each set has other lines. Question i is
    about stratum ``strata[i]`` of depth, of ``num_strata`` equal ones over [0, 1).
    """

    kind: KeyKind
    name: str
    seed: int
    number: int
    strata: tuple[int, ...]
    num_strata: int

    def build(self, num_lines: int) -> Document:
        """Builds the document, with a line or more for each question; a longer one begins with the same."""
        keys = line_keys(self.kind, num_lines, self._generator("keys"))
        draw, pick = self._generator("values"), self._generator("positions")
        values = [draw.randint(1, LARGEST_VALUE) for _ in range(num_lines)]
        questions = []
        for stratum in self.strata:
            # If strata are narrower than lines, the line in which the stratum begins.
            start = stratum * num_lines // self.num_strata
            end = max(start + 1, (stratum + 1) * num_lines // self.num_strata)
            at = start + int(pick.random() * (end - start))
            text, value, depth = question_text(keys[at]), values[at], at / num_lines
            duplicates = values.count(value) - 1
            questions.append(Question("line", text, (str(value),), depth, keys[at], at, duplicates))
        text = HEADER + "".join(map(line_text, keys, values))
        return Document(text, num_lines, tuple(questions), self.seed)

    def _generator(self, purpose: str) -> random.Random:
        return random.Random(f"{self.kind}/{self.name}/{self.seed}/{self.number}/{purpose}")


def plan_lines(
    kind: KeyKind, name: str, seed: int, num_samples: int, questions_per_document: int
) -> list[LinePlan]:
    """Plans documents for ``num_samples`` questions; the last documents may have one question fewer.

    Question i is about stratum i of depth. Adjacent strata go to different documents, so that the questions
    of each document cover its whole depth. Both numbers are at least 1.
    """
    documents = -(-num_samples // questions_per_document)
    return [
        LinePlan(kind, name, seed, number, tuple(range(number, num_samples, documents)), num_samples)
        for number in range(documents)
    ]


def longest_document(
    build: Callable[[int], Document], least: int, room: int, count_tokens: CountTokens
) -> Document:
    """The longest document whose prompts all fit into ``room`` tokens.

    The longest prompt is that of the question with the most tokens. The search counts only a few documents,
    as it extrapolates from each count to the next candidate.

    Args:
      build: builds a document of any number of lines from ``least`` on; many more lines have more tokens.
      least: if not even these fit, it is a ``ConfigError``.
      room: tokens for the prompt: the context minus the tokens of an answer.
      count_tokens: counts tokens as the model does.
    """

    def tokens(num_lines: int) -> int:
        document = build(num_lines)
        questions = (question.text for question in document.questions)
        return count_tokens(document.text, max(questions, key=lambda text: count_tokens("", text)))

    def tokens_per_line(num_lines: int, counted: int) -> float:
        """At least 1: a few lines more can have fewer tokens where each number of lines has other lines."""
        return max(1.0, (counted - needed) / (num_lines - least))

    needed = tokens(least)
    if needed > room:
        raise ConfigError(
            f"{needed} tokens are needed for {least} lines and a question, and {room} are left for a prompt; "
            "give a longer context, fewer --max-new-tokens, or fewer questions about a record"
        )
    counted = tokens(least + 100)
    if counted <= needed:
        raise ArgumentError(
            f"{least + 100} lines are counted as {counted} tokens, no more than {least} lines"
        )
    guess = least + int((room - needed) / tokens_per_line(least + 100, counted))
    fits, too_many = least, None
    while too_many is None or too_many - fits > 1:
        tried = max(guess, fits + 1) if too_many is None else min(max(guess, fits + 1), too_many - 1)
        counted = tokens(tried)
        if counted <= room:
            fits = tried
        else:
            too_many = tried
        guess = tried + int((room - counted) // tokens_per_line(tried, counted))
    return build(fits)


@dataclass(frozen=True)
class LineCase:
    """One test case, a row of LongChat's files: its fields, then our own. Any other fields are ignored.

    ``random_idx`` is the key, and position from 0, of the requested line, and ``correct_line`` that line with
    its newline; see ``Question`` and ``Document``.
    """

    random_idx: tuple[str | int, Annotated[int, pydantic.Field(ge=0)]]
    expected_number: int
    num_lines: Annotated[int, pydantic.Field(ge=1)]
    correct_line: str
    prompt: str
    depth: float | None = None
    seed: int | None = None
    value_duplicates: int | None = None


def write_cases(path: Path, documents: Sequence[Document]) -> None:
    """Writes a test case for every question of the documents, in order."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        for document, question in [(each, asked) for each in documents for asked in each.questions]:
            assert question.key is not None
            assert question.position is not None
            case = LineCase(
                random_idx=(question.key, question.position),
                expected_number=int(question.expected[0]),
                num_lines=document.num_lines,
                correct_line=line_text(question.key, question.expected[0]),
                prompt=document.text + question.text,
                depth=question.depth,
                seed=document.seed,
                value_duplicates=question.value_duplicates,
            )
            file.write(json_row(asdict(case)))


def read_cases(path: Path) -> list[Document]:
    """Reads one of our files or of LongChat's; consecutive cases with the same record form one document.

    A file that is absent or empty, or a case that is malformed or contradicts itself, is a ``DataError``.
    """
    documents: list[Document] = []
    remedy = "give one of LongChat's files, such as longeval/evaluation/lines/testcases/200_lines.jsonl"
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                document = _read_case(line, f"{path}, line {number}")
                if documents and documents[-1].text == document.text:
                    questions = documents[-1].questions + document.questions
                    documents[-1] = replace(documents[-1], questions=questions)
                else:
                    documents.append(document)
    except OSError as error:
        raise DataError(f"{path} {json_fault(error)}; {remedy}") from error
    if not documents:
        raise DataError(f"{path} is empty; {remedy}")
    return documents


def _read_case(line: bytes, where: str) -> Document:
    """The document of one case, with its one question."""
    try:
        case = parse_json(line, LineCase, foreign=True)
    except ValueError as error:
        raise DataError(f"{where} is not a test case of line retrieval: it {json_fault(error)}") from error
    (key, position), expected = case.random_idx, case.expected_number
    text, start, question = case.prompt.rpartition(QUESTION_START)
    question = start + question
    record = text.removeprefix(HEADER)
    lines = record.split("\n")[:-1]
    faults = {
        "the prompt does not begin with LongChat's header": not text.startswith(HEADER),
        f"the prompt does not end by asking for line {key}": question.rstrip() != question_text(key),
        f"correct_line is not that of key {key} and number {expected}": (
            case.correct_line != line_text(key, expected)
        ),
        f"the record has {len(lines)} lines, not num_lines {case.num_lines}": len(lines) != case.num_lines,
        f"line {position} of the record is not correct_line": (
            lines[position : position + 1] != [case.correct_line.rstrip("\n")]
        ),
    }
    wrong = [fault for fault, present in faults.items() if present]
    if wrong:
        raise DataError(
            f"{where} contradicts itself: {'; '.join(wrong)}. Remove the line or generate the file again"
        )
    duplicates = record.count(line_text("", expected).removeprefix("line ")) - 1
    depth = position / case.num_lines
    asked = Question("line", question, (str(expected),), depth, key, position, duplicates)
    return Document(text, case.num_lines, (asked,), case.seed)
