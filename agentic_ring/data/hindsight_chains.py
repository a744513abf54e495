"""Hindsight chains: trajectories sorted by return and relabelled to a common target return.

A chain holds trajectories of one task in ascending return and ends with one or more good ones, its leaders.
All are relabelled to the least return of a leader, R0: a member's return-to-go starts at R0 and decreases by
the rewards it collects. A poor member ends with most of it left, and that gap is the hindsight signal (arXiv
2305.16554). Every leader reaches the target, so the completion bit occurs before the end of a chain too, and
with 1 to n leaders every place of a chain holds one in some chains.
"""

from dataclasses import dataclass

import numpy as np

from agentic_ring.errors import ConfigError, DataError


@dataclass(frozen=True)
class ChainPlan:
    """A chain before its data is read: its members in ascending return, and their common target.

    Attributes:
      episodes: indices of the members.
      target: target return of all members.
      leaders: number of members at the end that reach the target, at least 1.
    """

    episodes: tuple[int, ...]
    target: float
    leaders: int = 1


def returns_to_go(rewards: np.ndarray, target: float) -> np.ndarray:
    """The return-to-go before each step, float32 [T]: ``target`` minus the ``rewards`` [T] collected so far.

    The first entry is the target itself.
    """
    collected = np.concatenate([[0.0], np.cumsum(rewards[:-1], dtype=np.float64)])
    return (target - collected).astype(np.float32)


def completions(rewards: np.ndarray, target: float) -> np.ndarray:
    """1 on the last step if the trajectory reached its target, else 0 everywhere; float32 [T].

    Sums are computed in float64 like the target, so that the best member of a chain reaches its own return
    exactly.
    """
    bits = np.zeros(len(rewards), np.float32)
    bits[-1] = rewards.sum(dtype=np.float64) >= target
    return bits


def plan_chain(returns: np.ndarray, episodes: np.ndarray, leaders: int = 1) -> ChainPlan:
    """Sorts ``episodes`` by ``returns`` [E], ascending; the target is the return of the poorest leader."""
    ascending = sorted(map(int, episodes), key=lambda episode: (returns[episode], episode))
    return ChainPlan(tuple(ascending), float(returns[ascending[-leaders]]), leaders=leaders)


def top_episodes(returns: np.ndarray, may_lead: np.ndarray, length: int, top_fraction: float) -> np.ndarray:
    """The episodes that a chain may end with, int [L] in ascending return; see ``StratifiedSampler``."""
    if length < 1:
        raise ConfigError(f"a chain of {length} trajectories was asked for; it needs at least 1")
    if not 0 < top_fraction <= 1:
        raise ConfigError(f"top_fraction is {top_fraction}; expected a share in (0, 1]")
    leaders = np.flatnonzero(may_lead)
    if len(returns) < length or not len(leaders):
        raise DataError(
            f"chains of {length} trajectories need at least as many episodes, and one of a policy; "
            f"the store has {len(returns)} and {len(leaders)}. Collect more, or use shorter chains"
        )
    leaders = leaders[np.argsort(returns[leaders], kind="stable")]
    return leaders[-max(1, round(top_fraction * len(leaders))) :]


class StratifiedSampler:
    """Draws chains whose returns span the data and that end with 1 to n leaders.

    Each number of leaders is equally probable, so that the model learns to act at every place of a chain:
    after poor members, after good ones, and without context. Leaders are drawn from the best episodes of a
    policy: the first one sets the target, the others return at least as much, and one may occur twice. The
    earlier members are drawn from all episodes below these, divided by rank into equal strata, one member
    from each. Uniform draws would seldom contain a good episode, and a chain teaches by the contrast between
    its members.

    Args:
      returns: float64 [E], of one task.
      may_lead: bool [E], whether an episode may be a leader (its actions are not noise).
      length: number of members of a chain.
      top_fraction: share of the episodes that may lead, by return, from which leaders are drawn.
      seed: seed of the draws, together with the chain's index.

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
        # With little data the strata would be empty, so the leaders fill them as well.
        pool = rest if len(rest) >= length - 1 else leaders
        pool = np.resize(pool, max(len(pool), length - 1))
        self._returns = returns
        self._top = top
        self._pool = pool[np.argsort(returns[pool], kind="stable")]
        self._length = length
        self._seed = seed

    def __call__(self, index: int, leaders: int | None = None) -> ChainPlan:
        """Plans the chain with this index: the same in every process and every run.

        ``leaders`` replaces the drawn number, from 1 to the length of a chain.
        """
        random = np.random.default_rng((self._seed, index))
        drawn = int(random.integers(1, self._length + 1))
        leaders = drawn if leaders is None else leaders
        first = int(random.integers(len(self._top)))
        others = random.integers(first, len(self._top), leaders - 1)
        strata = np.array_split(self._pool, self._length - leaders) if leaders < self._length else []
        earlier = [random.choice(stratum) for stratum in strata]
        return plan_chain(self._returns, np.array([*earlier, *self._top[[first, *others]]]), leaders)
