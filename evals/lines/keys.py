"""The four kinds of keys that lines go by in LongChat's line retrieval."""

import itertools
import random
import uuid
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, get_args

from wonderwords import RandomWord

from agentic_ring.errors import ArgumentError

KeyKind = Literal["LRT", "LRT-ABCindex", "LRT-UUID", "LRT-NL"]
"""Numbers from 1, words of the letters A to F, UUIDs, adjective-noun pairs; LongChat's own names."""

KINDS: tuple[KeyKind, ...] = get_args(KeyKind)

LONGEST_LIST_OF_PAIRS = 3_000_000
"""About half of the pairs there are; beyond it drawing one that is new takes ever longer."""


def line_keys(kind: KeyKind, count: int, generator: random.Random) -> Sequence[str | int]:
    """The first ``count`` keys, no two alike.

    With a generator of the same state, fewer keys are the beginning of more of them; letters alone
    are other ones once 6, 7, ... letters no longer suffice, as in LongChat.

    Raises:
      ArgumentError: no keys, or more pairs of words than ``LONGEST_LIST_OF_PAIRS``.
    """
    if count < 1:
        raise ArgumentError(f"{count} keys were asked for; at least 1 is needed")
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
    """Each word list is gone through in a random order, and then again in another.

    So no word returns before its list is used up: up to 910 lines have LongChat's own distribution, which
    ends there. A pair that was there already is passed over.
    """
    if count > LONGEST_LIST_OF_PAIRS:
        raise ArgumentError(
            f"{count} lines with pairs of words were asked for; there are {LONGEST_LIST_OF_PAIRS}. "
            "Take LRT-UUID for more"
        )
    adjectives, nouns = (_shuffled_again_and_again(words, generator) for words in word_lists())
    pairs: dict[str, None] = {}
    while len(pairs) < count:
        pairs[f"{next(adjectives)}-{next(nouns)}"] = None
    return list(pairs)


def _shuffled_again_and_again(words: Sequence[str], generator: random.Random) -> Iterator[str]:
    while True:
        yield from generator.sample(words, len(words))


@cache
def word_lists() -> tuple[list[str], list[str]]:
    """Adjectives and nouns, as wonderwords has them."""
    words = RandomWord(enhanced_prefixes=False)  # prefixes are slow to prepare and not needed
    return words.filter(include_categories=["adjective"]), words.filter(include_categories=["noun"])
