import random
import uuid
from itertools import pairwise

import pytest
from wonderwords import RandomWord

from agentic_ring.errors import ArgumentError
from evals.lines.keys import KINDS, line_keys


def keys(kind, count, seed=0):
    return list(line_keys(kind, count, random.Random(seed)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_keys_are_alike_at_512k_and_1m_tokens(kind):
    assert len(set(keys(kind, 50_000))) == 50_000


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_and_fewer_keys_are_the_beginning_of_more(kind):
    assert keys(kind, 100) == keys(kind, 100) == keys(kind, 8_000)[:100]
    assert (keys(kind, 100) != keys(kind, 100, seed=1)) == (kind in ("LRT-UUID", "LRT-NL"))


def test_numbers_begin_with_1_and_letters_are_six_until_seven_are_needed():
    assert keys("LRT", 3) == [1, 2, 3]
    assert keys("LRT-ABCindex", 8) == [
        "AAAAAA", "AAAAAB", "AAAAAC", "AAAAAD", "AAAAAE", "AAAAAF", "AAAABA", "AAAABB",
    ]  # fmt: skip
    assert {len(key) for key in keys("LRT-ABCindex", 6**6)} == {6}
    assert {len(key) for key in keys("LRT-ABCindex", 6**6 + 1)} == {7}


def test_uuids_are_of_version_4():
    assert {uuid.UUID(key).version for key in keys("LRT-UUID", 50)} == {4}


def test_up_to_910_lines_no_word_returns_as_in_longchat():
    pool = RandomWord()
    adjectives = pool.filter(include_categories=["adjective"])
    nouns = set(pool.filter(include_categories=["noun"]))
    assert len(adjectives) == 910
    rest = keys("LRT-NL", 910)
    for adjective in sorted(adjectives, key=len, reverse=True):  # "old-fashioned" before "old"
        found = [key for key in rest if key.startswith(f"{adjective}-")]
        found = [key for key in found if key.removeprefix(f"{adjective}-") in nouns]
        assert len(found) == 1, adjective
        rest.remove(found[0])
    assert rest == []


def test_pairs_are_in_no_order():
    pairs = keys("LRT-NL", 910)
    ascending = sum(a < b for a, b in pairwise(pairs))
    assert 350 < ascending < 560


@pytest.mark.parametrize("count", [0, -3])
def test_no_keys_are_refused(count):
    with pytest.raises(ArgumentError, match=f"{count} keys"):
        keys("LRT-NL", count)


def test_more_pairs_than_there_are_is_refused_at_once():
    with pytest.raises(ArgumentError, match=r"10000000 lines with pairs of words.*LRT-UUID"):
        keys("LRT-NL", 10_000_000)
