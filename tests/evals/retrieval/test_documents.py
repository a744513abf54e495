"""LongChat's line retrieval: keys, prompts, files, and the longest record that fits."""

import hashlib
import json
import random
import re
import uuid

import pytest

from agentic_ring.errors import ArgumentError, DataError
from evals.retrieval.documents import (
    HEADER,
    KINDS,
    LinePlan,
    count_word_partners,
    line_keys,
    line_text,
    longest_document,
    plan_lines,
    read_cases,
    write_cases,
)


def keys(kind, count, seed=0):
    return list(line_keys(kind, count, random.Random(seed)))


def plan(kind="LRT-NL", seed=0, samples=10, name="4k"):
    return plan_lines(kind, name, seed, samples, samples)[0]


def words(document: str, question: str) -> int:
    """A tokenizer of its own: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]|\n", document + question))


def most(document, count=words) -> int:
    return max(count(document.text, question.text) for question in document.questions)


def longest(plan, room, count=words):
    return longest_document(plan.build, len(plan.strata), room, count)


def test_keys_are_longchats_and_unique_and_the_seed_decides_them():
    for kind in KINDS:
        assert len(set(keys(kind, 50_000))) == 50_000
        assert keys(kind, 100) == keys(kind, 100) == keys(kind, 8_000)[:100]
        assert (keys(kind, 100) != keys(kind, 100, seed=1)) == (kind in ("LRT-UUID", "LRT-NL"))
    assert keys("LRT", 3) == [1, 2, 3]
    assert keys("LRT-ABCindex", 7) == [f"AAAAA{last}" for last in "ABCDEF"] + ["AAAABA"]
    assert [{len(key) for key in keys("LRT-ABCindex", 6**6 + more)} for more in (0, 1)] == [{6}, {7}]
    assert {uuid.UUID(key).version for key in keys("LRT-UUID", 50)} == {4}
    with pytest.raises(ArgumentError, match="10000000 "):
        keys("LRT-NL", 10_000_000)


def test_lines_with_the_adjective_or_the_noun_are_counted():
    others = ["old-dog", "old-e-mail"]
    # Of old-cat: old-dog, old-e-mail, and old-fashioned-dog up to its hyphen.
    partners = {"old-cat": 3, "new-dog": 3, "older-dogs": 0, "old-fashioned-dog": 2, "new-e-mail": 2}
    record = HEADER + "".join(line_text(each, 5) for each in [*partners, *others])
    assert {key: count_word_partners(record, key) for key in partners} == partners


@pytest.mark.parametrize("kind", KINDS)
def test_questions_are_answered_by_their_lines_and_the_longest_document_fits(kind):
    document = longest(plan(kind), 3996)
    lines = document.text.removeprefix(HEADER).splitlines()
    assert len(lines) == document.num_lines > 100
    for question in document.questions:
        (number,) = question.expected
        assert lines[question.position] == f"line {question.key}: REGISTER_CONTENT is <{number}>"
        assert question.depth == question.position / document.num_lines
        assert f"in line {question.key}? I need" in question.text
    assert most(document) <= 3996 < most(plan(kind).build(document.num_lines + 1))


@pytest.mark.parametrize(("samples", "per_document"), [(50, 7), (3, 10)])
def test_depths_are_asked_evenly_over_all_documents_and_in_each(samples, per_document):
    plans = plan_lines("LRT-NL", "4k", 0, samples, per_document)
    assert max(len(each.strata) for each in plans) <= per_document
    depths = [[question.depth for question in each.build(1000).questions] for each in plans]
    assert sorted(int(depth * samples) for each in depths for depth in each) == list(range(samples))
    for each in depths:
        assert [int(depth * len(each)) for depth in each] == list(range(len(each)))
    # With as many questions as lines, each line is asked for once.
    each = plan_lines("LRT", "4k", 0, samples, 3)[0]
    assert [question.position for question in each.build(3).questions] == [0, 1, 2]


def test_a_seed_gives_the_same_document_on_every_python_and_from_now_on():
    first, second = plan_lines("LRT-NL", "4k", 0, 50, 25)
    assert first.build(170).text.startswith(first.build(169).text)
    assert len({each.build(50).text for each in (first, second, plan(seed=1), plan(name="8k"))}) == 4
    longer = first.build(2000)  # than the lists of words
    text = longer.text + "".join(question.text for question in longer.questions)
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "0637ee9b3feefc35"


def test_the_search_counts_a_quarter_of_a_million_tokens_a_few_times_only():
    counted = []

    def count(document, question):
        counted.append(len(document))
        return words(document, question)

    document = longest(plan(), 2**18, count)
    assert document.num_lines > 10_000
    assert sum(length > 50_000 for length in counted) <= 6
    values = re.findall(r"<(\d+)>\n", document.text)
    duplicates = [values.count(question.expected[0]) - 1 for question in document.questions]
    assert [question.value_duplicates for question in document.questions] == duplicates
    assert any(duplicates)


def test_counts_may_fall_with_a_few_lines_more_but_must_grow():
    def count(document, question):
        return words(document, question) - 100 * (document.count("\n") % 2)

    room = most(plan().build(10), count) + 3
    document = longest(plan(), room, count)
    assert document.num_lines >= 10
    assert most(document, count) <= room
    with pytest.raises(ArgumentError, match="no more than 10 lines"):
        longest(plan(), 4096, lambda document, question: 512)


DOCUMENTS = [each.build(30) for each in plan_lines("LRT-NL", "4k", 7, 6, 3)]


@pytest.fixture
def rows(tmp_path):
    """LongChat's fields of each case in a file of ours."""
    write_cases(tmp_path / "cases.jsonl", DOCUMENTS)
    found = map(json.loads, (tmp_path / "cases.jsonl").read_text().splitlines())
    return [dict(list(row.items())[:5]) for row in found]


def test_files_have_longchats_keys_and_whole_prompts_and_read_back(tmp_path, rows):
    path = tmp_path / "cases.jsonl"
    assert read_cases(path) == DOCUMENTS
    first = rows[0]
    assert list(first) == ["random_idx", "expected_number", "num_lines", "correct_line", "prompt"]
    key, position = first["random_idx"]
    assert first["correct_line"] == f"line {key}: REGISTER_CONTENT is <{first['expected_number']}>\n"
    assert first["prompt"].split("\n")[2 + position] + "\n" == first["correct_line"]
    numbers = [LinePlan("LRT", "4k", 7, 0, (0, 1), 2).build(9)]
    write_cases(path, numbers)
    assert read_cases(path) == numbers
    # LongChat's own have other keys, and a trailing space.
    more = {"token_size": 4803, "prompt_length": -1, "prompt": first["prompt"] + " "}
    path.write_text(json.dumps(first | more) + "\n")
    (document,) = read_cases(path)
    (question,) = document.questions
    assert document.text + question.text == first["prompt"] + " "
    assert document.seed is None
    assert question.depth == question.position / 30


def test_a_bad_file_is_named_with_the_line(tmp_path, rows):
    path, (good, row) = tmp_path / "bad.jsonl", rows[:2]
    key = row["random_idx"][0]
    for change, message in (
        ({"expected_number": 1}, "correct_line is not that of key"),
        ({"num_lines": 31}, "has 30 lines, not num_lines 31"),
        ({"random_idx": ["other", 3]}, "does not end by asking for line other"),
        ({"random_idx": [key, 3000]}, "line 3000 of the record is not"),
        ({"prompt": row["prompt"][5:]}, "does not begin with LongChat's header"),
        ({"expected_number": "many"}, "expected_number = .many.: .*valid integer"),
    ):
        path.write_text(json.dumps(good) + "\n" + json.dumps(row | change) + "\n")
        with pytest.raises(DataError, match=rf"^{path}, line 2 .*{message}[^\n]*$"):
            read_cases(path)
    bad = {b"": "is empty", b"\xff\xfe\x00": "line 1 .* is not UTF-8", b"{\n": "line 1 is not a test case"}
    for content, message in bad.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"bad\.jsonl.* {message}"):
            read_cases(path)
    for absent, message in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path, "cannot be read")):
        with pytest.raises(DataError, match=message):
            read_cases(absent)
