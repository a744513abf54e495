"""The four kinds of line keys in LongChat's line retrieval, and the lines whose keys share a word."""

import itertools
import random
import uuid
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, get_args

from wonderwords import RandomWord

from agentic_ring.errors import ArgumentError

KeyKind = Literal["LRT", "LRT-ABCindex", "LRT-UUID", "LRT-NL"]
"""LongChat's names for numbers from 1, words of the letters A to F, UUIDs, and adjective-noun pairs."""

START_OF_VALUE = ": REGISTER_CONTENT is <"
"""What stands between the key and the value of a line."""

KINDS: tuple[KeyKind, ...] = get_args(KeyKind)

LONGEST_LIST_OF_PAIRS = 3_000_000
"""About half of all pairs; beyond it, drawing an unused pair takes ever longer."""


def line_keys(kind: KeyKind, count: int, generator: random.Random) -> Sequence[str | int]:
    """Returns ``count`` different keys.

    For the same state of the generator, a shorter list is the beginning of a longer one. Keys of letters
    are the exception: they become longer when 6, 7, ... letters no longer suffice, as in LongChat.

    Raises:
      ArgumentError: ``count`` is below 1, or above ``LONGEST_LIST_OF_PAIRS`` for pairs of words.
    """
    if count < 1:
        raise ArgumentError(f"{count} keys were requested; at least 1 is needed")
    if kind == "LRT":
        return range(1, count + 1)
    if kind == "LRT-ABCindex":
        length = next(n for n in itertools.count(6) if 6**n >= count)
        words = itertools.product("ABCDEF", repeat=length)
        return ["".join(letters) for letters in itertools.islice(words, count)]
    if kind == "LRT-UUID":
        return [str(uuid.UUID(int=generator.getrandbits(128), version=4)) for _ in range(count)]
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
    adjectives, nouns = (_reshuffled_forever(words, generator) for words in word_lists())
    pairs: dict[str, None] = {}
    while len(pairs) < count:
        pairs[f"{next(adjectives)}-{next(nouns)}"] = None
    return list(pairs)


def _reshuffled_forever(words: Sequence[str], generator: random.Random) -> Iterator[str]:
    while True:
        yield from generator.sample(words, len(words))


@cache
def word_lists() -> tuple[list[str], list[str]]:
    """The adjectives and nouns of wonderwords."""
    words = RandomWord(enhanced_prefixes=False)  # prefixes are slow to prepare and unused
    return words.filter(include_categories=["adjective"]), words.filter(include_categories=["noun"])


def count_word_partners(record: str, key: str) -> int:
    """Returns how many lines of a record, other than the key's own, share its adjective or its noun.

    Words that are the same up to a hyphen, such as "old" and "old-fashioned", count as shared.

    Args:
      record: header and lines.
      key: key of a line of the record, an adjective and a noun with a hyphen between them; in a file with
        other words than ours, the first hyphen is between them.
    """
    known = [word for word in _compound_adjectives() if key.startswith(f"{word}-")]
    adjective = known[0] if known else key.partition("-")[0]
    noun = key.removeprefix(f"{adjective}-")
    return record.count(f"\nline {adjective}-") + record.count(f"-{noun}{START_OF_VALUE}") - 2


@cache
def _compound_adjectives() -> list[str]:
    return [word for word in word_lists()[0] if "-" in word]
