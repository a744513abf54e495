import tracemalloc

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agentic_ring.errors import ArgumentError
from agentic_ring.results.intervals import (
    RESAMPLES,
    hierarchical_interval,
    improvement_interval,
    interquartile_mean_interval,
    mean_interval,
    t_interval,
    wilson_interval,
)

# Percentiles of two bootstraps differ by chance: for RESAMPLES = 10,000 the 2.5th percentile has a
# standard error of sqrt(.025 * .975 / 10,000) / density(1.96) = 0.027 standard errors of the mean.
# Five of those, for the difference of two independent bootstraps, are 0.19.
CHANCE = 0.19

scores = st.floats(-1000, 1000, allow_subnormal=False)
matrices = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=scores)


def test_mean_interval_agrees_with_scipy():
    runs = 5
    values = np.random.default_rng(runs).gamma(2.0, 50.0, runs)
    ours = mean_interval(values, "runs")
    options = {"n_resamples": RESAMPLES, "confidence_level": 0.95, "method": "percentile", "rng": 1}
    theirs = scipy.stats.bootstrap((values,), np.mean, **options).confidence_interval
    assert ours.value == pytest.approx(values.mean())
    assert ours.n == runs
    tolerance = CHANCE * scipy.stats.sem(values)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=tolerance)


def test_beside_a_bootstrap_over_seeds_and_tasks_stands_a_t_interval_over_seeds():
    scores = np.random.default_rng(0).normal([[[0.0], [2.0], [7.0]]], 1.0, (1, 3, 4))
    ours = hierarchical_interval(scores, lambda drawn: drawn[..., 0, :, :].mean((-2, -1)))
    theirs = scipy.stats.ttest_1samp(scores[0].mean(axis=1), 0).confidence_interval(0.95)
    assert ours.over_seeds == t_interval(scores[0].mean(axis=1), "seeds")
    assert (ours.over_seeds.low, ours.over_seeds.high) == pytest.approx(tuple(theirs))
    assert (ours.n, ours.over, ours.over_seeds.n) == (12, "tasks of 3 seeds", 3)
    assert t_interval([4.0], "seeds").low is None


def test_stratified_interval_agrees_with_a_loop_over_tasks():
    generator = np.random.default_rng(3)
    matrix = generator.normal([[10.0, 100.0, 40.0]], [[1.0, 20.0, 5.0]], (6, 3))
    ours = interquartile_mean_interval(matrix)
    estimates = []
    for _ in range(RESAMPLES):
        resampled = np.stack([generator.choice(matrix[:, task], 6) for task in range(3)], axis=1)
        estimates.append(np.sort(resampled.ravel())[4:-4].mean())
    expected = tuple(np.quantile(estimates, [0.025, 0.975]))
    assert (ours.low, ours.high) == pytest.approx(expected, abs=CHANCE * np.std(estimates))


def test_many_runs_do_not_need_memory_for_all_resamples_at_once():
    # 10,000 resamples of 6,000 scores are 480 MB, so they must be drawn in chunks.
    values = np.random.default_rng(0).normal(size=6_000)
    tracemalloc.start()
    interval = mean_interval(values, "runs")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6
    assert interval.high - interval.low == pytest.approx(2 * 1.96 / np.sqrt(6_000), rel=0.05)


@given(matrices)
def test_an_interquartile_mean_is_rliables_and_its_interval_repeatable(matrix):
    interval = interquartile_mean_interval(matrix)
    assert interval.value == pytest.approx(scipy.stats.trim_mean(matrix, 0.25, axis=None), abs=1e-9)
    assert interval == interquartile_mean_interval(matrix)
    margin = 1e-9 * max(1.0, np.abs(matrix).max())
    if len(matrix) > 1:
        assert matrix.min() - margin <= interval.low <= interval.high <= matrix.max() + margin


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: mean_interval([], "runs"), r"shape \(0,\)"),
        (lambda: mean_interval([[1.0]], "runs"), r"shape \(1, 1\); expected \[units\]"),
        (lambda: t_interval([1.0, float("nan")], "runs"), r"nan at \(1,\)"),
        (lambda: interquartile_mean_interval([1.0, 2.0]), r"\[seeds, tasks\]"),
        (lambda: improvement_interval(np.ones((4, 2)), np.ones((3, 2))), r"over \(3, 2\)"),
        (lambda: wilson_interval(0, 0, "answers"), "0 successes of 0"),
        (lambda: wilson_interval(5, 4, "answers"), "5 successes of 4"),
    ],
)
def test_bad_scores_are_named(compute, message):
    with pytest.raises(ArgumentError, match=message):
        compute()


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_mirrors_and_agrees_with_scipy(drawn):
    successes, trials = drawn
    interval = wilson_interval(successes, trials, "answers")
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    mirrored = wilson_interval(trials - successes, trials, "answers")
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((interval.low, interval.high), abs=1e-12)
    theirs = scipy.stats.binomtest(successes, trials).proportion_ci(method="wilson")
    assert (interval.low, interval.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@given(hnp.arrays(np.float64, (2, 4, 3), elements=scores))
@settings(max_examples=20, deadline=None)
def test_the_probability_of_improvement_is_mann_whitneys(both):
    own, other = both
    pairs = zip(own.T, other.T, strict=True)
    expected = (
        np.mean([scipy.stats.mannwhitneyu(*pair, method="asymptotic").statistic for pair in pairs]) / 16
    )
    found = improvement_interval(own, other)
    assert found.value == pytest.approx(expected)
    assert 0 <= found.low <= found.high <= 1
    assert improvement_interval(other, own).value == pytest.approx(1 - expected)
