"""Hindsight chains: trajectories sorted by return and relabelled to a common target return.

A chain holds trajectories of one task in ascending return and ends with one or more good ones, its
demonstrations. All are relabelled to the least return of a demonstration, R0: a trajectory's return-to-go
starts at R0 and decreases by the rewards it collects. A poor trajectory ends with most of it left, and that
gap is the hindsight signal (arXiv 2305.16554). Every demonstration reaches the target, so the completion bit
occurs before the end of a chain too, and with 1 to n demonstrations every position of a chain holds one in
some chains.
"""

from dataclasses import dataclass

import numpy as np

from agentic_ring.errors import ConfigError, DataError


@dataclass(frozen=True)
class ChainPlan:
    """A chain before its data is read."""

    episodes: tuple[int, ...]
    """Indices of its trajectories, in ascending return."""
    target: float
    """Target return of all of them."""
    demonstrations: int = 1
    """Number of trajectories at the end that reach the target, at least 1."""


def returns_to_go(rewards: np.ndarray, target: float) -> np.ndarray:
    """The return-to-go before each step, float32 [T]: ``target`` minus the ``rewards`` [T] so far."""
    collected = np.concatenate([[0.0], np.cumsum(rewards[:-1], dtype=np.float64)])
    return (target - collected).astype(np.float32)


def completions(rewards: np.ndarray, target: float) -> np.ndarray:
    """1 on the last step if the trajectory reached its target, else 0 everywhere; float32 [T].

    Sums are in float64 like the target, so that the best trajectory of a chain reaches its own return
    exactly.
    """
    bits = np.zeros(len(rewards), np.float32)
    bits[-1] = rewards.sum(dtype=np.float64) >= target
    return bits


class StratifiedSampler:
    """Draws chains whose returns span the data and that end with 1 to n demonstrations.

    Each number of demonstrations is equally probable, so that the model learns to act at every position of a
    chain: after poor trajectories, after good ones, and without context. Demonstrations are drawn from the
    best episodes of a policy: the first one sets the target, the others return at least as much, and one may
    occur twice. The earlier trajectories are drawn from all episodes below these, divided by rank into equal
    strata, one from each. Uniform draws would seldom contain a good episode, and a chain teaches by the
    contrast between its trajectories.

    Args:
      returns: float64 [E], of one task.
      learnable: bool [E], whether an episode may be a demonstration (its actions are not noise).
      length: number of trajectories of a chain.
      top_fraction: share of the learnable episodes, by return, from which demonstrations are drawn.
      seed: seed of the draws, together with the chain's index.

    Raises:
      ConfigError: ``length`` or ``top_fraction`` is out of range.
      DataError: there are fewer episodes than a chain needs, or none is learnable.
    """

    def __init__(
        self, returns: np.ndarray, learnable: np.ndarray, length: int, top_fraction: float, seed: int
    ):
        if length < 1 or not 0 < top_fraction <= 1:
            raise ConfigError(
                f"a chain of {length} trajectories was asked for, and top_fraction is {top_fraction}; a "
                "chain needs at least 1, and the share must be in (0, 1]"
            )
        best = np.flatnonzero(learnable)
        if len(returns) < length or not len(best):
            raise DataError(
                f"chains of {length} trajectories need at least as many episodes, and one of a policy; "
                f"the store has {len(returns)} and {len(best)}. Collect more, or use shorter chains"
            )
        best = best[np.argsort(returns[best], kind="stable")]
        self._top = best[-max(1, round(top_fraction * len(best))) :]
        rest = np.setdiff1d(np.arange(len(returns)), self._top)
        # Noise that did as well as a demonstration is left out: it could end up last.
        rest = rest[learnable[rest] | (returns[rest] < returns[self._top[0]])]
        # With little data the strata would be empty, so all learnable episodes fill them.
        pool = rest if len(rest) >= length - 1 else best
        pool = np.resize(pool, max(len(pool), length - 1))
        self._pool = pool[np.argsort(returns[pool], kind="stable")]
        self._returns = returns
        self._length = length
        self._seed = seed

    def __call__(self, index: int, demonstrations: int | None = None) -> ChainPlan:
        """Plans the chain with this index: the same in every process and every run.

        ``demonstrations`` replaces the drawn number, from 1 to the length of a chain.
        """
        random = np.random.default_rng((self._seed, index))
        drawn = int(random.integers(1, self._length + 1))
        good = drawn if demonstrations is None else demonstrations
        first = int(random.integers(len(self._top)))
        others = random.integers(first, len(self._top), good - 1)
        strata = np.array_split(self._pool, self._length - good) if good < self._length else []
        episodes = map(int, (*map(random.choice, strata), *self._top[[first, *others]]))
        ascending = tuple(sorted(episodes, key=lambda episode: (self._returns[episode], episode)))
        return ChainPlan(ascending, float(self._returns[ascending[-good]]), good)
