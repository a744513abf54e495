"""Records of LongChat's line retrieval: keys, prompts, and the longest record that fits."""

import random
import re
import uuid
from itertools import pairwise

import pytest
from wonderwords import RandomWord

from agentic_ring.errors import ArgumentError, ConfigError
from evals.retrieval.documents import (
    HEADER,
    KINDS,
    LinePlan,
    count_word_partners,
    line_keys,
    line_text,
    longest_document,
    plan_lines,
    question_text,
)

# From LongChat's longeval/evaluation/lines/testcases/700_lines.jsonl.
LONGCHAT_HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and "
    "contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, "
    "memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the "
    "corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)


def keys(kind, count, seed=0):
    return list(line_keys(kind, count, random.Random(seed)))


def plan(kind="LRT-NL", seed=0, samples=10, per_document=10, name="4k"):
    return plan_lines(kind, name, seed, samples, per_document)[0]


def words(document: str, question: str) -> int:
    """A tokenizer of its own: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]|\n", document + question))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_unique_and_the_seed_decides_them(kind):
    many = keys(kind, 50_000)
    assert len(set(many)) == 50_000
    assert keys(kind, 100) == keys(kind, 100) == keys(kind, 8_000)[:100]
    assert (keys(kind, 100) != keys(kind, 100, seed=1)) == (kind in ("LRT-UUID", "LRT-NL"))


def test_kinds_of_keys_are_longchats():
    assert keys("LRT", 3) == [1, 2, 3]
    assert keys("LRT-ABCindex", 7) == [f"AAAAA{last}" for last in "ABCDEF"] + ["AAAABA"]
    assert {len(key) for key in keys("LRT-ABCindex", 6**6)} == {6}
    assert {len(key) for key in keys("LRT-ABCindex", 6**6 + 1)} == {7}
    assert {uuid.UUID(key).version for key in keys("LRT-UUID", 50)} == {4}


def test_up_to_910_lines_no_word_returns_as_in_longchat():
    pool = RandomWord()
    adjectives = pool.filter(include_categories=["adjective"])
    nouns = set(pool.filter(include_categories=["noun"]))
    assert len(adjectives) == 910
    rest = keys("LRT-NL", 910)
    assert 350 < sum(a < b for a, b in pairwise(rest)) < 560  # in no order
    for adjective in sorted(adjectives, key=len, reverse=True):  # "old-fashioned" before "old"
        found = [key for key in rest if key.startswith(f"{adjective}-")]
        found = [key for key in found if key.removeprefix(f"{adjective}-") in nouns]
        assert len(found) == 1, adjective
        rest.remove(found[0])
    assert rest == []


@pytest.mark.parametrize("count", [0, 10_000_000])
def test_numbers_of_keys_that_cannot_be_are_refused(count):
    with pytest.raises(ArgumentError, match=f"{count} "):
        keys("LRT-NL", count)


PARTNER_KEYS = [
    "old-cat",
    "old-dog",
    "new-dog",
    "older-dogs",
    "old-fashioned-dog",
    "new-e-mail",
    "old-e-mail",
]


@pytest.mark.parametrize(
    ("key", "partners"),
    [
        ("old-cat", 3),  # old-dog, old-e-mail, and old-fashioned-dog up to its hyphen
        ("new-dog", 3),
        ("older-dogs", 0),
        ("old-fashioned-dog", 2),
        ("new-e-mail", 2),
    ],
)
def test_lines_with_the_adjective_or_the_noun_are_counted(key, partners):
    record = HEADER + "".join(line_text(each, 5) for each in PARTNER_KEYS)
    assert count_word_partners(record, key) == partners


def test_half_a_million_tokens_have_as_many_partners_as_words_repeat():
    document = LinePlan("LRT-NL", "512k", 0, 0, (0, 1, 2), 3).build(104_869)
    for question in document.questions:
        assert 110 <= count_word_partners(document.text, str(question.key)) <= 150


def test_the_strings_are_longchats_to_the_letter():
    assert line_text("grass-nutmeg", 8907) == "line grass-nutmeg: REGISTER_CONTENT is <8907>\n"
    assert question_text("grass-nutmeg") == (
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line grass-nutmeg? "
        "I need the number."
    )
    document = plan("LRT").build(20)
    assert document.text.startswith(f"{LONGCHAT_HEADER}line 1: REGISTER_CONTENT is <")
    assert document.text.count("\n") == 22


@pytest.mark.parametrize("kind", KINDS)
def test_each_question_is_answered_by_the_line_at_its_position(kind):
    document = plan(kind).build(300)
    lines = document.text.removeprefix(LONGCHAT_HEADER).splitlines()
    assert len(lines) == document.num_lines == 300
    for question in document.questions:
        (number,) = question.expected
        assert lines[question.position] == f"line {question.key}: REGISTER_CONTENT is <{number}>"
        assert question.depth == question.position / 300
        assert f"in line {question.key}? I need" in question.text


@pytest.mark.parametrize(("samples", "per_document"), [(50, 10), (50, 7), (3, 10)])
def test_depths_are_asked_evenly_over_all_documents_and_in_each(samples, per_document):
    plans = plan_lines("LRT-NL", "4k", 0, samples, per_document)
    assert max(len(each.strata) for each in plans) <= per_document
    depths = [[question.depth for question in each.build(1000).questions] for each in plans]
    assert sorted(int(depth * samples) for each in depths for depth in each) == list(range(samples))
    for each in depths:
        assert [int(depth * len(each)) for depth in each] == list(range(len(each)))


@pytest.mark.parametrize("samples", [25, 1000])
def test_with_as_many_questions_as_lines_each_line_is_asked_for_once(samples):
    each = plan_lines("LRT", "4k", 0, samples, 25)[0]
    assert [question.position for question in each.build(25).questions] == list(range(25))
    with pytest.raises(ArgumentError, match="24 lines cannot be asked 25"):
        each.build(24)


def test_a_seed_gives_the_same_document_on_every_python_and_from_now_on():
    first, second = plan_lines("LRT-NL", "4k", 0, 50, 25)
    document = first.build(169)
    assert document.text.split("\n")[2:5] == [
        "line excited-lumber: REGISTER_CONTENT is <7971>",
        "line healthy-slump: REGISTER_CONTENT is <42251>",
        "line precious-oncology: REGISTER_CONTENT is <19358>",
    ]
    assert [question.position for question in document.questions[:3]] == [1, 8, 14]
    assert first.build(170).text.startswith(document.text)
    texts = {each.build(50).text for each in (first, second, plan(seed=1), plan(name="8k"))}
    assert len(texts) == 4


def test_values_are_between_1_and_50000_and_duplicates_are_counted():
    document = plan(samples=200, per_document=200).build(20_000)
    values = [int(value) for value in re.findall(r"<(\d+)>\n", document.text)]
    assert 1 <= min(values) < max(values) <= 50_000
    expected = [values.count(int(question.expected[0])) - 1 for question in document.questions]
    assert [question.value_duplicates for question in document.questions] == expected
    assert any(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_document_fits_and_one_more_line_does_not(kind):
    each = plan(kind)
    document = longest_document(each, 3996, words)
    longest = max(words(document.text, question.text) for question in document.questions)
    more = each.build(document.num_lines + 1)
    assert longest <= 3996 < max(words(more.text, question.text) for question in more.questions)


def test_the_search_is_right_where_every_number_of_lines_can_be_tried():
    each = plan(samples=2)
    tried = [each.build(lines) for lines in range(2, 60)]
    longest = {d.num_lines: max(words(d.text, q.text) for q in d.questions) for d in tried}
    for room in range(longest[2], longest[50], 9):
        found = longest_document(each, room, words).num_lines
        assert longest[found] <= room < longest[found + 1]


def test_half_a_million_tokens_are_counted_a_few_times_only():
    counted = []

    def count(document, question):
        counted.append(len(document))
        return words(document, question)

    assert longest_document(plan(), 2**19, count).num_lines > 20_000
    assert sum(length > 100_000 for length in counted) <= 6


def test_contexts_that_are_too_short_and_counts_that_do_not_grow_are_refused():
    with pytest.raises(ConfigError, match=r"\d+ tokens are needed for 10 lines.*100 are left"):
        longest_document(plan(), 100, words)
    with pytest.raises(ArgumentError, match="no more than 10 lines"):
        longest_document(plan(), 4096, lambda document, question: 512)


def test_a_few_lines_more_may_have_fewer_tokens():
    def count(document, question):
        return words(document, question) - 100 * (document.count("\n") % 2)

    least = plan().build(10)
    room = max(count(least.text, question.text) for question in least.questions) + 3
    document = longest_document(plan(), room, count)
    assert document.num_lines >= 10
    assert max(count(document.text, question.text) for question in document.questions) <= room


@pytest.mark.parametrize(("samples", "per_document"), [(0, 1), (1, 0)])
def test_no_questions_are_refused(samples, per_document):
    with pytest.raises(ConfigError, match=f"num_samples is {samples} "):
        plan_lines("LRT", "4k", 0, samples, per_document)
