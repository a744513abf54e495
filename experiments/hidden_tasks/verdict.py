"""Pre-registered targets of the experiment on trained context length, and their verdict.

The unit is a training seed and a task. A score is a return over the oracle's mean return, of the same
training seed, number of cues and regions: the oracle has the same demonstrations and observes the goal. Every
quantity is the interquartile mean over the units, of paired differences where variants or blocks of trials
are compared; the order of the variants is that of their means. Intervals are 95% and hierarchical, over seeds
and tasks within them. A target whose variants were not trained is not met. The levels were set for point_mass
with dense rewards; what another body or kind of reward must show is the gain over n = 32, the controls and
unseen regions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from agentic_ring.data.hidden_tasks.family import Region, RewardKind
from agentic_ring.results.intervals import Interval, hierarchical_interval, interquartile_means
from experiments.common import targets
from experiments.common.targets import ABOVE_ZERO, Bound, NotMeasuredError, Target, Verdict

ORACLE = "oracle"
ONLINE = "online"
RIGHT_REWARDS, NOTHING = "right_pay", "nothing"
CORRUPTED = ("another_task", "zeroed", "shuffled")
CUES = 16
"""Number of cues at which a longer context is needed."""
BLOCK = 16
"""Trials in a block, whose mean return is judged."""
_SMALLEST = 1e-6
"""Smallest divisor, so that ratios stay finite where nothing is earned."""
VARIANTS = ("n1", "n4", "n16", "n32", "n128")
"""Variants in the order that their returns must have."""


class Case(NamedTuple):
    """One setting of the rollouts; its returns are float64 [seeds, tasks, trials]."""

    variant: str
    cues: int
    condition: str = ONLINE
    region: Region = "seen"


Returns = Mapping[Case, np.ndarray]


Measure = Callable[[Returns], Interval]


def block(returns: Returns, case: Case, first: int = -BLOCK) -> np.ndarray:
    """Mean return of each seed and task [S, E] over the block of trials from index ``first`` on.

    Raises:
      NotMeasuredError: the case is missing, or has fewer trials.
    """
    if case not in returns or returns[case].shape[-1] <= first:
        raise NotMeasuredError(f"{case} was not measured in trials from {first + 1} on")
    return returns[case][..., first:][..., :BLOCK].mean(axis=-1)


def scores(returns: Returns, case: Case, first: int = -BLOCK) -> np.ndarray:
    """Scores [S, E] over a block of trials, see ``block``."""
    oracle = Case(ORACLE, case.cues, region=case.region)
    if oracle not in returns:
        raise NotMeasuredError(f"{oracle} was not measured")
    return block(returns, case, first) / np.maximum(returns[oracle].mean(axis=(1, 2)), _SMALLEST)[:, None]


def level(quantity: np.ndarray) -> Interval:
    """Interquartile mean of a quantity [S, E]."""
    return hierarchical_interval(quantity[None], lambda drawn: interquartile_means(drawn[..., 0, :, :]))


def _ratio(over: np.ndarray, under: Sequence[np.ndarray]) -> Interval:
    """Ratio of one interquartile mean to the largest of others; all [S, E]."""

    def statistic(drawn: np.ndarray) -> np.ndarray:
        means = interquartile_means(drawn)
        return means[..., 0] / np.maximum(means[..., 1:].max(axis=-1), _SMALLEST)

    return hierarchical_interval(np.stack([over, *under]), statistic)


def _long(cues: int = CUES, condition: str = ONLINE, region: Region = "seen") -> Case:
    return Case("n128", cues, condition, region)


def _gain(over: str, cues: int = CUES) -> Measure:
    return lambda returns: level(scores(returns, _long(cues)) - scores(returns, Case(over, cues)))


def _rise(first: int) -> Measure:
    return lambda returns: level(scores(returns, _long()) - scores(returns, _long(), first))


def _value(value: Any, n: int) -> Interval:
    return Interval(float(value), None, None, n, "")


def _worst_seed(returns: Returns) -> Interval:
    gains = scores(returns, _long()) - scores(returns, Case("n32", CUES))
    return _value(interquartile_means(gains[:, None]).min(), len(gains))


def _smallest_step(axis: int | tuple[int, int], returns: Returns) -> Interval:
    means = np.stack([scores(returns, Case(name, CUES)).mean(axis=axis) for name in VARIANTS])
    return _value(np.diff(means, axis=0).min(), len(VARIANTS))


def _right_over_corrupted(returns: Returns) -> Interval:
    corrupted = [block(returns, _long(condition=condition)) for condition in CORRUPTED]
    return _ratio(block(returns, _long(condition=RIGHT_REWARDS)), corrupted)


def _corrupted_from_nothing(returns: Returns) -> Interval:
    nothing = scores(returns, _long(condition=NOTHING))
    levels = [level(scores(returns, _long(condition=condition)) - nothing) for condition in CORRUPTED]
    return max(levels, key=lambda found: max(abs(found.low or 0.0), abs(found.high or 0.0)))


def _unseen_over_seen(returns: Returns) -> Interval:
    return _ratio(block(returns, _long(region="unseen")), [block(returns, _long())])


def _fewest(axis: int) -> Measure:
    return lambda returns: _value(min(each.shape[axis] for each in returns.values()), 1)


CLAIM = "a longer trained context helps where the task holds more than a shorter one can"
_CLOSE = Bound(low=-0.05, high=0.05)
TARGETS: tuple[Target[Returns], ...] = (
    Target("training seeds", _fewest(0), Bound(least=3), Bound(least=5), everywhere=True),
    Target("tasks", _fewest(1), Bound(least=32), Bound(least=32), everywhere=True),
    Target(
        "K=16, n=128, trials 113-128",
        lambda returns: level(scores(returns, _long())),
        Bound(least=0.75, low=0.65),
        Bound(least=0.90),
    ),
    Target("last 16 minus first 16 trials", _rise(0), Bound(low=0.30), Bound(low=0.50)),
    Target("last 16 minus trials 49-64", _rise(48), Bound(least=0.08, low=0.0), Bound(least=0.15)),
    Target("n=128 minus n=32", _gain("n32"), Bound(least=0.10, low=0.0), Bound(least=0.20), everywhere=True),
    Target("n=128 minus n=32, worst seed", _worst_seed, ABOVE_ZERO, ABOVE_ZERO, everywhere=True),
    Target("n=128 minus n=4", _gain("n4"), Bound(least=0.40), Bound(least=0.60)),
    Target(
        "smallest step of 1 < 4 < 16 < 32 < 128 (aim: in every seed)",
        partial(_smallest_step, (0, 1)),
        ABOVE_ZERO,
        ABOVE_ZERO,
        aim_measure=partial(_smallest_step, 1),
    ),
    *(
        Target(
            f"K={cues}: n=128 minus n=32",
            _gain("n32", cues),
            _CLOSE,
            Bound(low=-0.02, high=0.02),
            everywhere=True,
        )
        for cues in (1, 4)
    ),
    Target(
        "112 random trials: right over best spoiled",
        _right_over_corrupted,
        Bound(least=2),
        Bound(least=3),
        everywhere=True,
    ),
    Target(
        "112 random trials: spoiled minus no context, widest interval",
        _corrupted_from_nothing,
        _CLOSE,
        _CLOSE,
        everywhere=True,
    ),
    Target(
        "unseen over seen regions", _unseen_over_seen, Bound(least=0.90), Bound(least=0.97), everywhere=True
    ),
)


def judge(returns: Returns, family: str = "point_mass", kind: RewardKind = "dense") -> Verdict:
    """Compares the returns of all variants with the targets for a family and a kind of reward."""
    every = (family, kind) == ("point_mass", "dense")
    return targets.judge(CLAIM, [target for target in TARGETS if every or target.everywhere], returns)
