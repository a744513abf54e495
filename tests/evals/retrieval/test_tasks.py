"""Scores of the ladder's answers, with partial credit."""

import pytest

from agentic_ring.errors import UnknownNameError
from evals.retrieval.tasks import TASKS, UNPARSABLE, named_tasks, parsed_number


@pytest.mark.parametrize(
    ("task", "expected", "answer", "score"),
    [
        ("line", ("417",), "The content of line 3 is <417>.", 1.0),
        ("line", ("417",), "417, in line 3", 0.0),
        ("line", ("417",), "none", 0.0),
        ("lines", ("a-1", "b-2", "10", "20"), "line a-1: 10\nline b-2: 20", 1.0),
        ("lines", ("a-1", "b-2", "10", "20"), "20 and 10", 1.0),
        ("lines", ("a-1", "b-2", "10", "20"), "line a-1: 10\nline b-2: 21", 0.5),
        ("lines", ("a-1", "b-2", "10", "20"), "10 20 30 40", 0.5),
        ("lines", ("a-1", "b-2", "10", "10"), "10", 0.5),
        ("lines", ("a-1", "b-2", "10", "20"), "", 0.0),
        ("hop3", ("b-2", "c-3", "30"), "line b-2\nline c-3\n30", 1.0),
        ("hop3", ("b-2", "c-3", "30"), "It is <30>", 1.0),
        ("hop3", ("b-2", "c-3", "30"), "line b-2\nline c-3\n31", 2 / 3),
        ("hop3", ("b-2", "c-3", "30"), "line b-2\nline c-31", 1 / 3),
        ("hop2", ("b-30", "30"), "line b-30", 0.5),
        ("hop2", ("7", "47"), "line 7\n47", 1.0),
        ("lines", ("16", "14", "146", "14"), "line 16: 146\nline 14: 14", 1.0),
        ("occurrence", ("12",), "12", 1.0),
        ("value", ("a-b", "c-d"), "line a-b and line c-d", 1.0),
        ("value", ("a-b", "c-d"), "line a-b", 0.5),
        ("value", ("a-b", "c-d"), "line a-b, line c-d, line e-f, line g-h", 0.5),
        ("value", ("a-b", "c-d"), "Line a-b\nLine c-d\nLine e-f\nLine g-h", 0.5),
        ("value", ("a-b", "c-d"), "line a-bc", 0.0),
        ("count", ("4",), "There are 4.", 1.0),
        ("count", ("4",), "3", 0.75),
        ("count", ("4",), "9", 0.0),
        ("count", ("4",), "many", 0.0),
        ("json", ("44",), '"44"', 1.0),
        ("json", ("44",), "445", 0.0),
        ("json", ("1b4e-28ba",), "the value is 1b4e-28ba.", 1.0),
    ],
)
def test_scores(task, expected, answer, score):
    assert TASKS[task].score(expected, answer) == pytest.approx(score)


def test_tasks_are_named_in_the_ladders_order():
    assert named_tasks("json, line") == ["line", "json"]
    assert named_tasks("all") == [*TASKS]
    assert named_tasks("literal,count") == ["line", "lines", "hop2", "hop3", "count", "json"]
    with pytest.raises(UnknownNameError, match="hop9"):
        named_tasks("line,hop9")


@pytest.mark.parametrize(
    ("answer", "last", "first"),
    [
        ("The <REGISTER_CONTENT> in line torpid-kid is <2416>.", 2416, 2416),
        ("line 17 is <4242>", 4242, 17),
        ("<00042>", 42, 42),
        ("1,234", 234, 1),
        ("-5", 5, 5),
        ("12abc34", 34, 12),
        ("no number", UNPARSABLE, UNPARSABLE),
        ("\n\n7\n", 7, 7),
    ],
)
def test_the_number_that_counts_as_the_answer(answer, last, first):
    assert parsed_number(answer, "last") == last
    assert parsed_number(answer, "first") == first


def test_an_endless_number_is_wrong_and_does_not_crash():
    assert parsed_number("9" * 10_000, "last") > 50_000
