"""Records of the ladder: exactly reproducible, with one right answer to each question."""

import hashlib
import re
from collections import Counter

import pytest

from agentic_ring.errors import ArgumentError
from evals.retrieval.documents import KINDS
from evals.retrieval.ladder_documents import LadderPlan
from evals.retrieval.tasks import TASKS
from tests.evals.retrieval.record_oracle import answer

LINES = tuple((task, 9) for task in TASKS if TASKS[task].record == "lines")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [None, 2000])
def test_the_answer_that_the_record_gives_has_the_full_score(kind, lines):
    plan = LadderPlan(kind, "4k", 3, 0, "lines", LINES)
    document = plan.build(lines or plan.least)
    assert Counter(question.task for question in document.questions) == dict(LINES)
    for question in document.questions:
        found = answer(document.text, question.text)
        assert TASKS[question.task].score(question.expected, found) == 1.0, question
        assert 0 <= question.depth < 1


@pytest.mark.parametrize("kind", KINDS)
def test_json_records_are_json_and_their_answers_are_in_them(kind):
    document = LadderPlan(kind, "4k", 3, 0, "json", (("json", 20),)).build(300)
    assert len(document.questions) == 20
    for question in document.questions:
        assert (answer(document.text, question.text),) == question.expected


def test_no_shared_number_is_that_of_another_line_and_groups_have_their_sizes():
    plan = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("value", 8), ("count", 8)))
    document = plan.build(5000)
    counts = [question for question in document.questions if question.task == "count"]
    assert [question.expected for question in counts] == [("2",), ("3",), ("4",), ("5",)] * 2
    assert all(answer(document.text, question.text) == question.expected[0] for question in counts)
    plan = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("count", 400), ("occurrence", 400)))
    document = plan.build(plan.least)
    for question in document.questions[-400:]:
        (value,) = re.findall(r"<\d+>", question.text)
        assert document.text.count(f": REGISTER_CONTENT is {value}\n") == int(question.expected[0])


def test_two_words_say_where_in_a_chain_an_answer_is():
    document = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("hop2", 40), ("hop3", 40))).build(2000)
    pairs = []
    for line in document.text.splitlines():
        key, _, content = line.removeprefix("line ").partition(": REGISTER_CONTENT is <line ")
        if content:
            pairs.append((key.split("-")[-1], content.split("-")[0]))
    assert len(pairs) == 120
    assert len({*pairs}) == 120


def test_records_are_exactly_reproducible_and_differ_by_seed_and_length():
    def digest(seed: int, name: str) -> str:
        document = LadderPlan("LRT-NL", name, seed, 0, "lines", LINES).build(500)
        text = document.text + "".join(question.text for question in document.questions)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    assert digest(0, "4k") == digest(0, "4k") == "247b54e099f26c07"
    assert len({digest(0, "4k"), digest(1, "4k"), digest(0, "8k")}) == 3


def test_too_few_lines_are_refused():
    plan = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("hop3", 10),))
    with pytest.raises(ArgumentError, match="59 lines are too few for these questions; 60 are needed"):
        plan.build(59)
