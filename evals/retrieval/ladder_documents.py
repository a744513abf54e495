"""Records of the ladder: one of lines, which serves all tasks but one, and one of JSON.

Among ordinary lines, which have a key of their own and a random number, stand those that tasks need::

    line A: REGISTER_CONTENT is <line B>       chains: A leads to B, and B is an ordinary line (or leads on)
    line C: REGISTER_CONTENT is <123>          4 lines with one key and different numbers
    line D: REGISTER_CONTENT is <456>          2 to 5 lines with one number, which no other line has

Nothing is encoded twice: all questions of a record are asked behind one prefilled copy of it. JSON has a
record of its own.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentic_ring.errors import ConfigError
from evals.retrieval.documents import (
    HEADER,
    LARGEST_VALUE,
    QUESTION_START,
    CountTokens,
    Document,
    KeyKind,
    Question,
    line_keys,
    line_text,
    longest_document,
    question_text,
)
from evals.retrieval.tasks import TASKS, Record

LISTED = 4
"""Lines that a question of the task ``lines`` asks for."""
OCCURRENCES = 4
"""Lines that share a key."""
GROUP_SIZES = range(2, 6)
"""Lines that share a number."""
HOPS = {"hop2": 1, "hop3": 2}
"""Lines of a chain before the one with the number."""

LIST_START = f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in each of these lines:"
LIST_END = "\nI need the numbers in this order, each as 'line <line index>: <REGISTER_CONTENT>'."
CHAIN_START = (
    f"{QUESTION_START} Some lines contain another line in place of a number. Write the <REGISTER_CONTENT> of "
    "the line that I ask for, then that of the line it leads to, and so on, one below the other, until it is "
    "a number."
)
OCCURRENCE_QUESTION = (
    f"{QUESTION_START} Several lines begin with line {{key}}. Tell me what is the <REGISTER_CONTENT> in "
    "number {number} of them, in the order of the record? I need the number."
)
GROUP_QUESTIONS = {
    "value": f"{QUESTION_START} Tell me all lines whose <REGISTER_CONTENT> is <{{}}>. I need their line "
    "indices, each as 'line <line index>'.",
    "count": f"{QUESTION_START} In how many lines is the <REGISTER_CONTENT> <{{}}>? I need the number.",
}
JSON_HEADER = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
JSON_KEY, JSON_VALUE = '\n\nKey: "', '"\nCorresponding value:'


@dataclass(frozen=True)
class LadderPlan:
    """Everything that determines a document, except its number of lines.

    It is document ``number`` of the set ``name``, such as ``4k``, with so many questions of each task.
    """

    kind: KeyKind
    name: str
    seed: int
    number: int
    record: Record
    asked: tuple[tuple[str, int], ...]

    @property
    def least(self) -> int:
        """Least number of lines: at least half of them are ordinary."""
        counts = Counter(dict(self.asked))
        repeated = OCCURRENCES * -(-counts["occurrence"] // OCCURRENCES)
        chains = sum((hops + 1) * counts[task] for task, hops in HOPS.items())
        special = sum(_group_sizes(counts)) + repeated + chains
        return max(2 * special, 4 * LISTED, 2 * max(counts.values()))

    def build(self, num_lines: int) -> Document:
        """Builds the document, which has ``least`` lines or more."""
        place = f"{self.kind}/{self.name}/{self.seed}/{self.number}/{self.record}/{num_lines}"
        draw = random.Random(f"ladder/{place}")
        keys = [str(key) for key in line_keys(self.kind, num_lines, draw)]
        counts = Counter(dict(self.asked))
        if self.record == "json":
            return _json_document(keys, self.kind, counts["json"], draw)
        return _LineRecord(keys, counts, draw).document()


def ladder_documents(
    tasks: Sequence[str],
    kind: KeyKind,
    name: str,
    seed: int,
    num_samples: int,
    room: int,
    count_tokens: CountTokens,
) -> list[Document]:
    """As few records as hold all questions of a length; each kind of record has its own.

    ``num_samples`` questions are asked of each task; for ``room`` and errors see ``longest_document``.
    """

    def fewest(record: Record, asked: Sequence[str]) -> list[Document]:
        for records in itertools.count(1):
            shares = [len(range(number, num_samples, records)) for number in range(records)]
            plans = [
                LadderPlan(kind, name, seed, number, record, tuple((task, share) for task in asked))
                for number, share in enumerate(shares)
            ]
            try:
                return [longest_document(plan.build, plan.least, room, count_tokens) for plan in plans]
            except ConfigError:
                if records == num_samples:
                    raise
        raise AssertionError

    documents = []
    for record in ("lines", "json"):
        asked = [task for task in tasks if TASKS[task].record == record]
        documents += fewest(record, asked) if asked else []
    return documents


def _group_sizes(counts: Counter[str]) -> list[int]:
    """Sizes of the groups of lines with one number; both tasks ask about the same groups."""
    return list(itertools.islice(itertools.cycle(GROUP_SIZES), max(counts["value"], counts["count"])))


def _json_document(keys: Sequence[str], kind: KeyKind, count: int, draw: random.Random) -> Document:
    """Pairs of keys with numbers, or with UUIDs where the keys are UUIDs, as in Lost in the Middle."""
    if kind == "LRT-UUID":
        values = [str(value) for value in line_keys(kind, len(keys), draw)]
    else:
        values = [str(draw.randint(1, LARGEST_VALUE)) for _ in keys]
    pairs = ",\n ".join(
        f'{json.dumps(key, ensure_ascii=False)}: "{value}"' for key, value in zip(keys, values, strict=True)
    )
    questions = tuple(
        Question("json", f"{JSON_KEY}{keys[place]}{JSON_VALUE}", (values[place],), place / len(keys))
        for place in _spread(range(len(keys)), count, draw)
    )
    return Document(f"{JSON_HEADER}{{{pairs}}}", len(keys), questions)


def _spread(places: Sequence[int], count: int, draw: random.Random) -> list[int]:
    """One of each of ``count`` equal parts of the places."""
    edges = [number * len(places) // max(1, count) for number in range(count + 1)]
    return [places[draw.randrange(first, end)] for first, end in itertools.pairwise(edges)]


class _LineRecord:
    """A record of lines that is being laid out, and the questions about it."""

    def __init__(self, keys: list[str], counts: Counter[str], draw: random.Random):
        self._keys, self._counts, self._draw = keys, counts, draw
        self._free = draw.sample(range(len(keys)), len(keys))
        self._led: set[tuple[str, str]] = set()
        sizes = _group_sizes(counts)
        shared = draw.sample(range(1, LARGEST_VALUE + 1), len(sizes))
        self._others = sorted({*range(1, LARGEST_VALUE + 1)} - {*shared})
        self._contents = [str(draw.choice(self._others)) for _ in keys]
        self._groups = [(value, self._take(size)) for value, size in zip(shared, sizes, strict=True)]
        for value, group in self._groups:
            for place in group:
                self._contents[place] = str(value)

    def document(self) -> Document:
        """The record with all its questions."""
        # Each takes lines away from the ordinary ones, which the questions for lines ask for.
        special = [*self._occurrence_questions(), *self._chain_questions(), *self._group_questions()]
        questions = (*self._line_questions(), *special)
        text = HEADER + "".join(map(line_text, self._keys, self._contents))
        return Document(text, len(self._keys), questions)

    def _take(self, count: int) -> list[int]:
        """Places of lines that are no longer ordinary, in the order of the record."""
        return sorted(self._free.pop() for _ in range(count))

    def _line_questions(self) -> Iterator[Question]:
        for place in _spread(sorted(self._free), self._counts["line"], self._draw):
            text = question_text(self._keys[place])
            yield Question("line", text, (self._contents[place],), place / len(self._keys))
        for _ in range(self._counts["lines"]):
            places, words = [], set()
            while len(places) < LISTED:  # keys without a word in common
                place = self._draw.choice(self._free)
                of_key = {*self._keys[place].split("-")}
                if not words & of_key:
                    places.append(place)
                    words |= of_key
            keys, values = ([texts[place] for place in places] for texts in (self._keys, self._contents))
            text = LIST_START + "".join(f"\nline {key}" for key in keys) + LIST_END
            yield Question("lines", text, (*keys, *values), min(places) / len(self._keys))

    def _occurrence_questions(self) -> Iterator[Question]:
        count = self._counts["occurrence"]
        for first in range(0, count, OCCURRENCES):
            places = self._take(OCCURRENCES)
            values = self._draw.sample(self._others, OCCURRENCES)
            key = self._keys[places[0]]
            for number, (place, value) in enumerate(zip(places, values, strict=True), start=1):
                self._keys[place], self._contents[place] = key, str(value)
                if first + number <= count:
                    text = OCCURRENCE_QUESTION.format(key=key, number=number)
                    yield Question("occurrence", text, (str(value),), place / len(self._keys))

    def _chain_questions(self) -> Iterator[Question]:
        for task in HOPS:
            for _ in range(self._counts[task]):
                target = self._free.pop()
                stations = [self._contents[target]]
                for _ in range(HOPS[task]):
                    leading = self._leading_to(target)
                    self._contents[leading] = f"line {self._keys[target]}"
                    stations.insert(0, self._keys[target])
                    target = leading
                text = CHAIN_START + question_text(self._keys[target]).removeprefix(QUESTION_START)
                yield Question(task, text, tuple(stations), target / len(self._keys))

    def _leading_to(self, target: int) -> int:
        """Takes a line to lead to another.

        No other line with the same last word leads to one with the same first word: then two words say
        where in a chain an answer is.
        """
        while True:
            number = self._draw.randrange(len(self._free))
            words = self._keys[self._free[number]].split("-")[-1], self._keys[target].split("-")[0]
            if words not in self._led:
                self._led.add(words)
                return self._free.pop(number)

    def _group_questions(self) -> Iterator[Question]:
        for task, text in GROUP_QUESTIONS.items():
            for value, places in self._groups[: self._counts[task]]:
                keys = tuple(self._keys[place] for place in places)
                expected = keys if task == "value" else (str(len(places)),)
                yield Question(task, text.format(value), expected, places[0] / len(self._keys))
