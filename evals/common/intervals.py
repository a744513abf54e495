"""Means, interquartile means and their bootstrap intervals; proportions and their Wilson intervals.

The bootstrap's interval is the percentile bootstrap's: resample the runs with replacement, compute the
statistic of each resample, and take the 2.5th and 97.5th percentiles. With several tasks the runs
are resampled within each task (stratified), as in Agarwal et al., "Deep Reinforcement Learning at
the Edge of the Statistical Precipice" (arXiv 2108.13264, section 4), whose interquartile mean is
the one here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from agentic_ring.errors import ArgumentError

CONFIDENCE = 0.95
RESAMPLES = 10_000

# Scores held at once while resampling: 32 MiB of float64.
_CHUNK_SCORES = 2**22

# Reduces the last two axes (runs, tasks) of an array of resampled scores.
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval, in the unit of the scores.

    Attributes:
      low: lower bound, or None where a single run says nothing about the spread.
      high: upper bound, likewise.
      n: runs behind the estimate (for each task).
    """

    value: float
    low: float | None
    high: float | None
    n: int


def mean_interval(values: ArrayLike, *, confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """Mean of independent runs with its bootstrap interval.

    Args:
      values: [runs], one score a run.
      confidence: probability that the interval is meant to cover, in (0, 1).
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ArgumentError: not one-dimensional, empty, a non-finite score, or a confidence outside (0, 1).
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise ArgumentError(f"values has shape {values.shape}; one score a run is expected: [runs]")
    return _bootstrap(values[:, None], _means, confidence, seed)


def interquartile_mean_interval(
    scores: ArrayLike, *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """Interquartile mean over runs and tasks with its stratified bootstrap interval.

    It is the mean of the middle half of all scores: the floor(n/4) lowest and highest are left out.

    Args:
      scores: [runs, tasks]; scores of different tasks must be on one scale.
      confidence: probability that the interval is meant to cover, in (0, 1).
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ArgumentError: not two-dimensional, empty, a non-finite score, or a confidence outside (0, 1).
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2:
        raise ArgumentError(f"scores has shape {scores.shape}; a matrix is expected: [runs, tasks]")
    return _bootstrap(scores, _interquartile_means, confidence, seed)


def improvement_interval(
    scores: ArrayLike, over: ArrayLike, *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """Probability that a run of one method does better than one of another, averaged over tasks.

    Ties count half (the Mann-Whitney statistic; arXiv 2108.13264, section 4.3). The runs of both methods
    are resampled, each within its task.

    Args:
      scores: [runs, tasks] of the method that is asked about.
      over: [runs, tasks] of the other, with as many runs.
      confidence, seed: as in ``interquartile_mean_interval``.

    Raises:
      ArgumentError: shapes that differ or are not two-dimensional, or what that function refuses.
    """
    scores, over = np.asarray(scores, np.float64), np.asarray(over, np.float64)
    if scores.ndim != 2 or scores.shape != over.shape:
        raise ArgumentError(
            f"scores has shape {scores.shape} and over {over.shape}; two matrices "
            "[runs, tasks] alike are expected"
        )
    return _bootstrap(np.concatenate([scores, over], axis=1), _improvement, confidence, seed)


def wilson_interval(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Share of successes with Wilson's score interval (JASA 22, 1927, page 209).

    Unlike the bootstrap's it is of use for few trials and at 0 or all successes, where the
    bootstrap sees no spread.

    Raises:
      ArgumentError: no trials, successes that are not among them, or a confidence outside (0, 1).
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ArgumentError(f"{successes} successes of {trials} trials; expected 0 to all, of 1 or more")
    _check_confidence(confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    centre = share + z**2 / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    # At 0 and all successes a bound is the share itself, which rounding must not move past it.
    low, high = min((centre - half) / scale, share), max((centre + half) / scale, share)
    return Interval(share, max(0.0, low), min(1.0, high), trials)


def _bootstrap(scores: np.ndarray, statistic: Statistic, confidence: float, seed: int) -> Interval:
    """Percentile bootstrap of ``statistic`` over scores [runs, tasks], stratified by task."""
    scores = _checked(scores)
    _check_confidence(confidence)
    value = float(statistic(scores))
    runs, tasks = scores.shape
    if runs == 1:
        return Interval(value, None, None, runs)
    generator = np.random.default_rng(seed)
    estimates = np.empty(RESAMPLES)
    chunk = max(1, _CHUNK_SCORES // scores.size)
    for start in range(0, RESAMPLES, chunk):
        count = min(chunk, RESAMPLES - start)
        drawn = generator.integers(runs, size=(count, runs, tasks))
        estimates[start : start + count] = statistic(scores[drawn, np.arange(tasks)])
    low, high = np.quantile(estimates, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high), runs)


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ArgumentError(f"confidence is {confidence}; it must lie between 0 and 1, such as 0.95")


def _checked(scores: np.ndarray) -> np.ndarray:
    if scores.size == 0:
        raise ArgumentError(f"scores has shape {scores.shape}; at least one score is expected")
    if not np.isfinite(scores).all():
        bad = tuple(int(index) for index in np.argwhere(~np.isfinite(scores))[0])
        raise ArgumentError(f"score {scores[bad]} at {bad} is not finite; leave out or rerun that run")
    return scores


def _means(scores: np.ndarray) -> np.ndarray:
    return scores.mean(axis=(-2, -1))


def _interquartile_means(scores: np.ndarray) -> np.ndarray:
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)


def _improvement(scores: np.ndarray) -> np.ndarray:
    """Of scores [..., runs, 2 tasks], whose halves are two methods."""
    own, other = np.split(scores, 2, axis=-1)
    difference = own[..., :, None, :] - other[..., None, :, :]
    return ((np.sign(difference) + 1) / 2).mean(axis=(-3, -2, -1))
