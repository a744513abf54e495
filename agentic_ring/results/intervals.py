"""95% confidence intervals, each of which says over what: environments, training seeds, answers, ...

Percentile bootstrap for means and interquartile means, Wilson for proportions; beside a bootstrap over few
training seeds stands Student's t interval, because resamples of three seeds cover too little.

The percentile bootstrap resamples the runs with replacement, computes the statistic of each resample, and
takes the 2.5th and 97.5th percentiles. With several tasks it resamples within each task (stratified), as in
Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv 2108.13264,
section 4), which also defines the interquartile mean. ``scipy.stats.bootstrap`` has no strata.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from agentic_ring.errors import ArgumentError
from agentic_ring.extras import needs_extra

with needs_extra("models"):
    from scipy.stats import sem, t

CONFIDENCE = 0.95
RESAMPLES = 10_000

# Number of scores in memory while resampling: 32 MiB of float64.
_CHUNK_SCORES = 2**22

# Reduces the last two axes, units and tasks, of resampled scores.
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval, in the unit of the scores.

    Attributes:
      low, high: bounds, or None for a single unit, which has no spread.
      n: number of independent units.
      over: what these units are: "environments", or "tasks of 3 seeds".
      over_seeds: the mean over training seeds with Student's t interval, where seeds are one of two levels.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    over: str
    over_seeds: "Interval | None" = None

    def __format__(self, form: str) -> str:
        """The value with its bounds, if it has any, each in this form, such as 1.0 (0.9 to 1.1)."""
        bounds = "" if self.low is None else f" ({self.low:{form}} to {self.high:{form}})"
        return f"{self.value:{form}}{bounds}"


def mean_interval(values: ArrayLike, over: str) -> Interval:
    """Mean of independent units, one score [units] for each, with its bootstrap confidence interval.

    Args:
      over: what the units are.

    Raises:
      ArgumentError: values are not one-dimensional, empty or not finite.
    """
    scores = _checked(values, "units")[:, None]
    return _within_tasks(scores, lambda drawn: drawn.mean(axis=(-2, -1)), over)


def t_interval(values: ArrayLike, over: str) -> Interval:
    """Mean of independent units [units] with Student's t interval, for few units that vary about normally.

    Raises:
      ArgumentError: values are not one-dimensional, empty or not finite.
    """
    scores = _checked(values, "units")
    value, n = float(scores.mean()), len(scores)
    if n == 1:
        return Interval(value, None, None, n, over)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, n - 1) * sem(scores))
    return Interval(value, value - reach, value + reach, n, over)


def interquartile_mean_interval(scores: ArrayLike) -> Interval:
    """Interquartile mean over seeds and tasks [seeds, tasks] with its stratified bootstrap interval.

    It is the mean of the middle half of all scores, without the floor(n/4) lowest and highest; all tasks must
    use the same scale. Seeds are resampled within each task, so that the tasks are taken as given.

    Raises:
      ArgumentError: scores are not two-dimensional, empty or not finite.
    """
    return _within_tasks(_checked(scores, "seeds, tasks"), interquartile_means, "seeds of each task")


def improvement_interval(scores: ArrayLike, over: ArrayLike) -> Interval:
    """Probability of improvement: that a seed of one method beats one of another, averaged over tasks.

    Ties count half (the Mann-Whitney statistic; arXiv 2108.13264, section 4.3). The seeds of both methods
    are resampled within each task.

    Args:
      scores: [seeds, tasks] of the method.
      over: [seeds, tasks] of the method that it is compared with, with as many seeds.

    Raises:
      ArgumentError: the shapes differ or are not two-dimensional, empty or not finite.
    """
    scores, over = _checked(scores, "seeds, tasks"), _checked(over, "seeds, tasks")
    if scores.shape != over.shape:
        raise ArgumentError(f"scores has shape {scores.shape} and over {over.shape}; expected the same shape")
    return _within_tasks(np.concatenate([scores, over], axis=1), _improvement, "seeds of each task")


def hierarchical_interval(scores: ArrayLike, statistic: Statistic) -> Interval:
    """A statistic of several quantities with its hierarchical bootstrap interval.

    Draws training seeds with replacement, and then tasks within each drawn seed, so that the interval covers
    both kinds of chance. All quantities of a seed and task are drawn together, so differences are paired.

    Args:
      scores: [quantities, seeds, tasks]; the tasks of different seeds need not be the same.
      statistic: reduces [..., quantities, seeds, tasks] to [...].

    Returns:
      The interval, without bounds for a single seed and task. Its ``over_seeds`` is of the statistic of each
      seed's tasks.

    Raises:
      ArgumentError: scores are not three-dimensional, empty or not finite.
    """
    scores = _checked(scores, "quantities, seeds, tasks")
    quantities, seeds, tasks = scores.shape
    units = scores.reshape(quantities, -1)

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        drawn_seeds = generator.integers(seeds, size=(count, seeds, 1))
        drawn = tasks * drawn_seeds + generator.integers(tasks, size=(count, seeds, tasks))
        return np.moveaxis(units[:, drawn], 0, 1)

    found = _bootstrap(scores, statistic, draw, seeds * tasks, f"tasks of {seeds} seeds")
    each = statistic(np.moveaxis(scores, 1, 0)[:, :, None])
    return replace(found, over_seeds=t_interval(each, "seeds"))


def wilson_interval(successes: float, trials: int, over: str) -> Interval:
    """Share of successes with Wilson's score interval; ``over`` says what the trials are.

    Unlike the bootstrap it is valid for few trials and for 0 or all successes, where resamples have no
    spread. ``successes`` may be a sum of scores in [0, 1], which vary at most as much as successes and
    failures with the same mean: the interval is then too wide, if anything.

    Raises:
      ArgumentError: no trials, or more successes than trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ArgumentError(f"{successes} successes of {trials} trials; expected 0 to all, of 1 or more")
    share, z = successes / trials, NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = share + z * z / (2 * trials)
    reach = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    low, high = ((centre + side) / (1 + z * z / trials) for side in (-reach, reach))
    # Exactly the ends, where rounding would leave them.
    return Interval(share, low if successes else 0.0, high if successes < trials else 1.0, trials, over)


def _within_tasks(scores: np.ndarray, statistic: Statistic, over: str) -> Interval:
    """Percentile bootstrap of a statistic of scores [units, tasks], stratified by task."""
    units, tasks = scores.shape

    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        return scores[generator.integers(units, size=(count, units, tasks)), np.arange(tasks)]

    return _bootstrap(scores, statistic, draw, units, over)


def _bootstrap(
    scores: np.ndarray,
    statistic: Statistic,
    draw: Callable[[np.random.Generator, int], np.ndarray],
    n: int,
    over: str,
) -> Interval:
    """Percentile bootstrap of a statistic of ``n`` units; ``draw`` makes a number of resamples."""
    value = float(statistic(scores))
    if n == 1:
        return Interval(value, None, None, n, over)
    generator, chunk = np.random.default_rng(0), max(1, _CHUNK_SCORES // scores.size)
    counts = (min(chunk, RESAMPLES - start) for start in range(0, RESAMPLES, chunk))
    estimates = np.concatenate([statistic(draw(generator, count)) for count in counts])
    low, high = np.quantile(estimates, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high), n, over)


def _checked(values: ArrayLike, axes: str) -> np.ndarray:
    """The scores as an array, which must have these axes and only finite scores, at least one."""
    scores = np.asarray(values, np.float64)
    if scores.ndim != len(axes.split()) or scores.size == 0:
        raise ArgumentError(f"scores has shape {scores.shape}; expected [{axes}], with at least one score")
    if not np.isfinite(scores).all():
        bad = tuple(int(index) for index in np.argwhere(~np.isfinite(scores))[0])
        raise ArgumentError(f"score {scores[bad]} at {bad} is not finite; leave that run out or repeat it")
    return scores


def interquartile_means(scores: np.ndarray) -> np.ndarray:
    """Interquartile means of scores [..., seeds, tasks] over the last two axes: [...]."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)


def _improvement(scores: np.ndarray) -> np.ndarray:
    """Probabilities of improvement for scores [..., seeds, 2 tasks]: two methods, one after the other."""
    own, other = np.split(scores, 2, axis=-1)
    difference = own[..., :, None, :] - other[..., None, :, :]
    return ((np.sign(difference) + 1) / 2).mean(axis=(-3, -2, -1))
