"""The criteria for in-context learning, on numbers chosen by hand."""

import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from evals.common.intervals import Interval
from evals.in_context.task_rollouts import CONTEXTS
from evals.in_context.trial_curves import plot_task_family
from evals.in_context.verdict import BEST_OF_NO_CONTEXT, BEST_ONLINE, POOLED, TaskFamilyReport, Verdict, judge


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


ENVIRONMENTS, TRIALS, DRAWS = 8, 4, 4


def report(**trials: list[float]) -> TaskFamilyReport:
    """Returns of a task with these trials and of one with ten times the rewards; hardly any spread."""
    noise = np.random.default_rng(0).normal(0, 0.01, (ENVIRONMENTS, TRIALS))
    found = {
        "online": [10, 20, 30, 40],
        "no_context": [10, 12, 11, 10],
        **{name: [9] for name in CONTEXTS},
        "right": [30],
    }
    found |= trials
    returns = {name: np.array(values) + noise[:, : len(values)] for name, values in found.items()}
    return TaskFamilyReport(
        {"run": returns, "flip": {name: 10 * values for name, values in returns.items()}},
        {"run": 100.0, "flip": 1000.0},
        first_seed=50,
        draws=DRAWS,
    )


def test_pooled_returns_are_shares_of_each_tasks_target():
    pooled = report().intervals(POOLED)
    assert [trial.value for trial in pooled["online"]] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-3)
    assert pooled["online"][0].n == ENVIRONMENTS
    assert pooled["right"][0].value == pytest.approx(0.3, abs=1e-3)


def test_environments_that_share_a_stored_context_are_one_run():
    found = report()
    by_context = np.repeat([0.0, 10.0, 20.0, 30.0], ENVIRONMENTS // DRAWS)[:, None]
    changed = {
        name: {**returns, "right": returns["right"] + by_context} for name, returns in found.returns.items()
    }
    [interval] = replace(found, returns=changed).intervals("run")["right"]
    assert interval.n == DRAWS
    assert interval.value == pytest.approx(45, abs=0.1)
    # Of four means 10 apart, drawn with replacement, the lowest 2.5% lie around 33.75 and below 36.
    assert 30 < interval.low < 36
    assert 54 < interval.high < 60


def test_the_best_of_trials_without_context_is_a_control():
    found = report(no_context=[10, 60, 11, 10])
    assert found.intervals("run")[BEST_OF_NO_CONTEXT][0].value == pytest.approx(60, abs=0.1)
    assert found.intervals(POOLED)[BEST_OF_NO_CONTEXT][0].value == pytest.approx(0.6, abs=1e-3)
    assert not found.verdict("run").claimed
    assert report().verdict("run").claimed
    assert report().verdict(POOLED).claimed


def test_the_best_online_claims_nothing():
    found = report(online=[10, 60, 11, 9])
    assert found.intervals("run")[BEST_ONLINE][0].value == pytest.approx(60, abs=0.1)
    assert not found.verdict("run").claimed


def test_a_rise_of_a_control_is_no_learning():
    assert not report(zeroed=[41]).verdict("flip").claimed


def test_figures_and_rows_hold_every_trial():
    figures = {figure.name: figure for figure in report().figures()}
    assert figures["run/online/trial_4"].value == pytest.approx(40, abs=0.1)
    assert figures["pooled/wrong"].unit == "target"
    assert figures["flip/learns_in_context"].value == 1
    rows = report().rows()
    assert len(rows) == 2 * ENVIRONMENTS * (2 * TRIALS + len(CONTEXTS))
    last = [
        row for row in rows if row["task"] == "run" and row["condition"] == "online" and row["trial"] == 4
    ]
    assert [row["seed"] for row in last] == list(range(50, 58))
    assert np.mean([row["return"] for row in last]) == pytest.approx(40, abs=0.1)


def test_the_figure_has_a_panel_a_task(tmp_path):
    plot_task_family(tmp_path / "hidden.png", "cheetah", report())
    assert (tmp_path / "hidden.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_a_line_a_trial_and_a_column_a_task():
    console = Console(width=100, record=True)
    console.print(report().table("two tasks"))
    lines = [line for line in console.export_text().splitlines() if "online, trial 4" in line]
    assert len(lines) == 1
    assert re.search(r" 40.* 40\d.* 0.4", lines[0])
