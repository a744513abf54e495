import numpy as np
import pytest

from agentic_ring.results import intervals
from agentic_ring.results.intervals import hierarchical_interval, interquartile_means
from experiments.hidden_tasks.verdict import Case, judge

SEEDS, TASKS, TRIALS = 3, 32, 128
ORACLE = 4.0
RISE = {"n1": (0.3, 0.32), "n4": (0.3, 0.36), "n16": (0.3, 0.5), "n32": (0.3, 0.66), "n128": (0.25, 0.95)}
"""Score of each variant in the first and in the last trial."""
CONTROLS = {"right_pay": 0.6, "another_task": 0.2, "zeroed": 0.21, "shuffled": 0.19, "nothing": 0.2}
LAST, STEP = "K=16, n=128, trials 113-128", "smallest step of 1 < 4 < 16 < 32 < 128 (aim: in every seed)"
RATIO = "112 random trials: right over best spoiled"
CORRUPTED = "112 random trials: spoiled minus no context, widest interval"


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch) -> None:
    monkeypatch.setattr(intervals, "RESAMPLES", 1000)


def made_up(**changes: float) -> dict[Case, np.ndarray]:
    """Returns that meet every target; ``changes`` are added to the scores of a variant or a condition."""
    random = np.random.default_rng(0)

    def returns(score: np.ndarray | float, change: float) -> np.ndarray:
        noise = 0.02 * random.standard_normal((SEEDS, TASKS, 1))
        return ORACLE * (np.broadcast_to(score, (SEEDS, TASKS, np.size(score))) + noise + change)

    found = {}
    for cues in (1, 4, 16):
        found[Case("oracle", cues)] = np.full((SEEDS, TASKS, TRIALS), ORACLE)
        for variant, ends in RISE.items():
            curve = np.linspace(*ends, TRIALS) if cues == 16 else np.full(TRIALS, 0.98)
            found[Case(variant, cues)] = returns(curve, changes.get(variant, 0.0))
    found[Case("n128", 16, region="unseen")] = 0.98 * found[Case("n128", 16)] + changes.get("unseen", 0.0)
    for condition, score in CONTROLS.items():
        flat = np.full(16, score)
        found[Case("n128", 16, condition)] = returns(flat, changes.get(condition, 0.0))
    return found


def test_returns_that_meet_every_target_are_claimed():
    verdict = judge(made_up())
    assert verdict.claimed
    assert {check.result for check in verdict.checks} == {"pass"}
    (last,) = (check.found for check in verdict.checks if check.target.name == LAST)
    assert last.value == pytest.approx(0.9086, abs=0.01)
    assert last.low < last.value < last.high
    assert "NOT" not in str(verdict)
    assert verdict.figures()[-1].value == 1


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"n32": 0.2}, {"n=128 minus n=32", *(f"K={k}: n=128 minus n=32" for k in (1, 4))}),
        ({"n4": 0.3}, {"n=128 minus n=4", STEP}),
        ({"n1": 0.1}, {STEP}),
        ({"zeroed": 0.15}, {RATIO}),
        ({"zeroed": 0.06}, {CORRUPTED}),
        ({"nothing": 0.08}, {CORRUPTED}),
        ({"unseen": -0.6}, {"unseen over seen regions"}),
        ({"n128": -0.2}, {LAST, "n=128 minus n=4"}),
        ({}, {"last 16 minus first 16 trials", "last 16 minus trials 49-64", "n=128 minus n=32, worst seed"}),
    ],
)
def test_each_target_can_be_missed(changes, names):
    found = made_up(**changes)
    if not changes:  # a flat curve, and one bad seed
        found[Case("n128", 16)] = np.full((SEEDS, TASKS, TRIALS), 0.9 * ORACLE)
        found[Case("n128", 16)][1] = found[Case("n32", 16)][1] - 0.1
    assert names <= {check.target.name for check in judge(found).checks if not check.met}


def test_variants_and_seeds_that_are_missing_are_not_a_pass():
    demo = {case: found[:1] for case, found in made_up().items() if case.variant not in ("n1", "n16")}
    verdict = judge(demo)
    results = {check.target.name: check.result for check in verdict.checks}
    assert results["training seeds"] == "MISSED"
    assert results[STEP] == "not measured"
    assert results["n=128 minus n=32"] == "pass"
    assert not verdict.claimed
    assert "NOT shown; 2 of 14" in str(verdict)


@pytest.mark.parametrize(("family", "kind"), [("reacher", "dense"), ("point_mass", "coin")])
def test_another_body_or_reward_is_judged_by_the_gain_over_32_controls_and_unseen_regions(family, kind):
    def two_variants(**changes: float) -> dict[Case, np.ndarray]:
        all_of_them = made_up(**changes)
        found = {case: each for case, each in all_of_them.items() if case.variant not in ("n1", "n4", "n16")}
        return found | {Case("oracle", 16): np.full((SEEDS, TASKS, TRIALS), 1.4 * ORACLE)}

    assert judge(two_variants(), family, kind).claimed
    assert not judge(two_variants()).claimed
    for changes in ({"n32": 0.2}, {"zeroed": 0.15}, {"unseen": -0.6}):
        assert not judge(two_variants(**changes), family, kind).claimed


def test_the_hierarchical_interval_has_the_chance_of_seeds():
    random = np.random.default_rng(1)

    def width(between: float, within: float) -> float:
        scores = between * random.standard_normal((1, 5, 1)) + within * random.standard_normal((1, 5, 64))
        found = hierarchical_interval(scores, lambda drawn: interquartile_means(drawn[..., 0, :, :]))
        assert found.n == 5 * 64
        return found.high - found.low

    assert width(between=0.0, within=1.0) < 0.4
    assert width(between=1.0, within=0.01) > 0.5
    # Quantities are drawn in pairs.
    scores = random.standard_normal((1, 2, 8)) * 10
    both = np.concatenate([scores + 1, scores])
    found = hierarchical_interval(
        both, lambda drawn: (drawn[..., 0, :, :] - drawn[..., 1, :, :]).mean((-2, -1))
    )
    assert (found.low, found.high) == pytest.approx((1, 1))
