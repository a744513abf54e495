"""Hindsight chains: which trajectories make a chain, and what each of them is told it aimed at.

A chain holds trajectories of one task in ascending return. All are relabelled to the best return of
the chain, R0, so a member's return-to-go starts at R0, falls by the rewards it collects, and a poor
member ends with much of it unspent: that gap is the hindsight signal (arXiv 2305.16554).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from agentic_ring.errors import ConfigError, DataError


@dataclass(frozen=True)
class ChainPlan:
    """A chain before anything is read: its members in ascending return, and their common target.

    Attributes:
      episodes: the members.
      target: return that all of them are told to aim at.
      task: whose rewards the members earn; None stands for the one task of the chains.
      leaders: members at the end that are among the best of the data, at least the last one.
    """

    episodes: tuple[int, ...]
    target: float
    task: str | None = None
    leaders: int = 1


Sampler = Callable[[int], ChainPlan]
"""The chain of a number: the same on every process and in every run."""


def returns_to_go(rewards: np.ndarray, target: float) -> np.ndarray:
    """What is left of ``target`` before each step: target minus the rewards collected so far.

    Args:
      rewards: [T].

    Returns:
      float32 [T]; the first entry is the target itself.
    """
    collected = np.concatenate([[0.0], np.cumsum(rewards[:-1], dtype=np.float64)])
    return (target - collected).astype(np.float32)


def completions(rewards: np.ndarray, target: float) -> np.ndarray:
    """1 on the last step if the trajectory reached its target, else 0 everywhere; float32 [T].

    Sums run in float64, as those that made the target did, so that the best member of a chain
    reaches its own return exactly.
    """
    bits = np.zeros(len(rewards), np.float32)
    bits[-1] = rewards.sum(dtype=np.float64) >= target
    return bits


def plan_chain(returns: np.ndarray, episodes: np.ndarray) -> ChainPlan:
    """Orders ``episodes`` by their ``returns`` [E], ascending, and sets the target to the best."""
    ascending = sorted(map(int, episodes), key=lambda episode: (returns[episode], episode))
    return ChainPlan(tuple(ascending), float(returns[ascending[-1]]))


def top_episodes(returns: np.ndarray, may_lead: np.ndarray, length: int, top_fraction: float) -> np.ndarray:
    """The episodes that chains may end with, int [L] in ascending return; arguments and errors as below."""
    if length < 1:
        raise ConfigError(f"a chain of {length} trajectories was asked for; it needs at least 1")
    if not 0 < top_fraction <= 1:
        raise ConfigError(f"top_fraction is {top_fraction}; expected a share in (0, 1]")
    leaders = np.flatnonzero(may_lead)
    if len(returns) < length or not len(leaders):
        raise DataError(
            f"chains of {length} trajectories need at least as many episodes and one that a policy "
            f"acted in; the store has {len(returns)} and {len(leaders)}. Collect more, or use shorter "
            "chains"
        )
    leaders = leaders[np.argsort(returns[leaders], kind="stable")]
    return leaders[-max(1, round(top_fraction * len(leaders))) :]


class StratifiedSampler:
    """Draws chains whose returns span the data.

    The last member comes from the best of the episodes that a policy acted in. The others come from
    everything below them, cut by rank into equal strata, one member from each; uniform draws would
    seldom hold a good episode, and the contrast between members is what a chain teaches.

    Args:
      returns: float64 [E], of one task.
      may_lead: bool [E], whether an episode may be the last of a chain (its actions are no noise).
      length: members of a chain.
      top_fraction: share of the leading episodes, by return, that the last member is drawn from.
      seed: with the chain's index it alone decides what is drawn.

    Raises:
      ConfigError: ``length`` or ``top_fraction`` is out of range.
      DataError: there are fewer episodes than a chain needs, or none may lead.
    """

    def __init__(
        self, returns: np.ndarray, may_lead: np.ndarray, length: int, top_fraction: float, seed: int
    ):
        top = top_episodes(returns, may_lead, length, top_fraction)
        leaders = top_episodes(returns, may_lead, length, top_fraction=1.0)
        rest = np.setdiff1d(np.arange(len(returns)), top)
        # Noise that did as well as a leader is left out: it could end up last.
        rest = rest[may_lead[rest] | (returns[rest] < returns[top[0]])]
        # With little data the strata would be empty: then the leaders fill them as well.
        pool = rest if len(rest) >= length - 1 else leaders
        pool = np.resize(pool, max(len(pool), length - 1))
        pool = pool[np.argsort(returns[pool], kind="stable")]
        self._returns = returns
        self._top = top
        self._strata = np.array_split(pool, length - 1) if length > 1 else []
        self._seed = seed

    def __call__(self, index: int) -> ChainPlan:
        """The chain number ``index``: the same on every process and in every run."""
        random = np.random.default_rng((self._seed, index))
        last = random.choice(self._top)
        earlier = [random.choice(stratum) for stratum in self._strata]
        return plan_chain(self._returns, np.array([*earlier, last]))
