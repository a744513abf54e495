"""When learning in context may be claimed, on numbers made by hand."""

import pytest

from evals.common.intervals import Interval
from evals.in_context.verdict import Verdict, judge


def interval(value: float, half: float = 1.0) -> Interval:
    return Interval(value, value - half, value + half, 32)


def verdict(**changes: Interval) -> Verdict:
    found = {
        "first": interval(10),
        "last": interval(20),
        "no_context": interval(11),
        "zeroed": interval(9),
        "right": interval(18),
        "wrong": interval(15),
    } | changes
    controls = {name: found.pop(name) for name in ("no_context", "zeroed")}
    return judge(controls=controls, **found)


def test_learning_is_claimed_where_every_check_holds():
    assert verdict().claimed
    assert str(verdict()).startswith(
        "verdict: learns in context\nyes  last trial above the first: 20 (19 to 21)"
    )


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"first": interval(19)}, "last trial above the first"),
        ({"first": interval(10, half=9.5)}, "last trial above the first"),  # higher, but intervals meet
        ({"first": interval(30)}, "last trial above the first"),
        ({"zeroed": interval(20)}, "last trial above zeroed"),
        ({"no_context": interval(18.5)}, "last trial above no_context"),
        ({"wrong": interval(15.1)}, "context of the right task above the wrong one's by 20%"),
        (
            {"right": interval(0), "wrong": interval(0)},
            "context of the right task above the wrong one's by 20%",
        ),
    ],
)
def test_one_check_that_fails_is_enough(changes, failing):
    found = verdict(**changes)
    assert not found.claimed
    assert [check.claim for check in found.checks if not check.holds] == [failing]
    assert "NOT shown" in str(found)
    assert f"NO   {failing}" in str(found)


def test_a_single_run_shows_nothing():
    assert not verdict(last=Interval(20, None, None, 1)).claimed
