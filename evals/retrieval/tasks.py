"""Tasks of the ladder: what each asks of a record, whose test it follows, and how an answer is scored."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentic_ring.errors import UnknownNameError

Record = Literal["lines", "json"]
Rule = Literal["last", "first"]

UNPARSABLE = -1
"""The number of an answer that contains none, as in LongChat; no line has this value."""
MOST_DIGITS = 100
"""Digits that are parsed: Python refuses to convert thousands of them, and a model may write that many."""


@dataclass(frozen=True)
class Task:
    """A kind of question about a kind of record."""

    title: str
    record: Record
    literal: bool
    """Whether the answer, as it is to be written, follows from finding equal words alone. The others need the
    order of several lines, their number, or a memory of those that have been answered."""
    score: Callable[[Sequence[str], str], float]
    """(expected, answer) -> score in [0, 1]; see each function."""


def parsed_number(answer: str, rule: Rule) -> int:
    """The number that counts as the answer: the last one in the text, or the first one.

    LongChat takes the last; other versions of the test take the first. They differ if an answer repeats
    the question ("line 17 is <4242>") or continues after it.
    """
    numbers = _numbers(answer)
    return int(numbers[-1 if rule == "last" else 0]) if numbers else UNPARSABLE


def score_last_number(expected: Sequence[str], answer: str) -> float:
    """1 if the last number of the answer is the expected one."""
    return float(_numbers(answer)[-1:] == [*expected])


def score_count(expected: Sequence[str], answer: str) -> float:
    """1 less the relative error of the last number, and at least 0."""
    (right,), found = map(int, expected), _numbers(answer)[-1:]
    return max(0.0, 1.0 - abs(int(found[0]) - right) / right) if found else 0.0


def score_numbers(expected: Sequence[str], answer: str) -> float:
    """Share of the expected numbers in the answer, of all its numbers if those are more.

    ``expected`` begins with the keys that were asked for; digits in them do not count.
    """
    keys, numbers = expected[: len(expected) // 2], [*expected[len(expected) // 2 :]]
    found = _numbers(_without(answer, keys))
    hits = sum(min(found.count(number), numbers.count(number)) for number in {*numbers})
    return hits / max(len(numbers), len(found))


def score_lines(expected: Sequence[str], answer: str) -> float:
    """Share of the expected keys in the answer, of all the lines that it names if those are more."""
    hits = sum(_contains(answer, key) for key in expected)
    return hits / max(len(expected), len(re.findall(r"\bline\s+(?=\S)", answer, re.IGNORECASE)))


def score_chain(expected: Sequence[str], answer: str) -> float:
    """1 if the last number is the one at the end; else the share of stations, which come first, it names."""
    *stations, number = expected
    if _numbers(_without(answer, stations))[-1:] == [number]:
        return 1.0
    return sum(_contains(answer, station) for station in stations) / len(expected)


def score_contained(expected: Sequence[str], answer: str) -> float:
    """1 if the answer contains the expected value as a word."""
    return float(_contains(answer, expected[0]))


def _numbers(text: str) -> list[str]:
    return [number[:MOST_DIGITS].lstrip("0") or "0" for number in re.findall(r"\d+", text)]


def _contains(text: str, word: str) -> bool:
    return re.search(_as_word(word), text) is not None


def _without(text: str, words: Sequence[str]) -> str:
    """The text without the first occurrence of each word."""
    for word in words:
        text = re.sub(_as_word(word), "", text, count=1)
    return text


def _as_word(text: str) -> str:
    return rf"(?<!\w){re.escape(text)}(?!\w)"


TASKS = {
    # literal: LongChat; RULER (arXiv 2404.06654); BABILong (arXiv 2406.10149); RULER
    "line": Task("the number in one line", "lines", True, score_last_number),
    "lines": Task("the numbers in 4 lines", "lines", True, score_numbers),
    "hop2": Task("the number 2 lines on", "lines", True, score_chain),
    "hop3": Task("the number 3 lines on", "lines", True, score_chain),
    # not literal: Michelangelo (arXiv 2409.12640); RULER; LongBench (arXiv 2308.14508)
    "occurrence": Task("the number in the n-th of 4 lines with one key", "lines", False, score_last_number),
    "value": Task("all lines with one value", "lines", False, score_lines),
    "count": Task("the number of lines with one value", "lines", False, score_count),
    # Lost in the Middle (arXiv 2307.03172)
    "json": Task("the value of a JSON key", "json", True, score_contained),
}
"""The tasks by name. docs/ladder.md says after which test each is made."""


def named_tasks(text: str) -> list[str]:
    """The names in a list such as ``line,hop2``, in the ladder's order; "all" and "literal" are lists too."""
    groups = {name: [name] for name in TASKS}
    groups |= {"all": [*TASKS], "literal": [name for name, task in TASKS.items() if task.literal]}
    asked: set[str] = set()
    for name in filter(None, map(str.strip, text.split(","))):
        if name not in groups:
            raise UnknownNameError("task", name, (*groups,))
        asked.update(groups[name])
    return [name for name in TASKS if name in asked]
