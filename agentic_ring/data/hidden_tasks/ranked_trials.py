"""Ranking of explored trials: the best and the partly successful ones for each goal of a pool of seen goals.

Demonstrations are the best trials for a goal *and* a cell of initial states: without the cells the best would
be those that started near the goal.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.family import Family
from agentic_ring.errors import ConfigError, DataError, check_at_least_one
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz
from agentic_ring.files.read_errors import remedy_for
from agentic_ring.terminal.progress import progress

BANDS = (0.05, 0.5, 1.0, 2.0, 3.5)
"""Bounds of the dense return of graded trials, of four bands, for trials of 8 decisions; they grow with their
number."""
_GRADED = 64
"""Graded trials that are kept for each goal and band."""
_GOALS_AT_A_TIME, _TRIALS_AT_A_TIME = 20, 8192
_VERSION = 2
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class RankingConfig:
    """Settings of a ranking."""

    goals: int = 1000
    """Number of goals in the pool, at least 2: distractors are good at another goal."""
    demonstrations: int = 8
    """Number of best trials for each goal and start cell."""
    seed: int = 0
    """Seed of the pool and of the choice of graded trials."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "goals", "demonstrations")
        if self.goals < 2:
            raise ConfigError(f"goals is {self.goals}; use 2 or more")


@dataclass(frozen=True, eq=False)
class RankedTrials:
    """A pool of M seen goals, and the numbers of explored trials that are ranked for each of them."""

    goals: np.ndarray
    """float64 [M, G]."""
    demonstrations: np.ndarray
    """int32 [M, C, L], the L best trials of each of C start cells, the best one first."""
    graded: np.ndarray
    """int32 [M, 4, 64], trials whose dense return lies in each of the ``BANDS``; where a band has no trial,
    those of the nearest lower band, or else of the nearest higher one."""


def rank_trials(store: ExplorationStore, config: RankingConfig = RankingConfig()) -> RankedTrials:
    """Ranks the trials of a store by dense return; reads the result of an earlier call beside the store.

    The result's file name contains a digest of the trials, the settings and the held-out regions, so that a
    result never serves another store.

    Raises:
      DataError: a start cell has too few trials, no trial comes near a goal, or the stored result is damaged.
    """
    family = store.family
    of_family = (family.held_out, family.start_cells, family.near, family.far)
    of_ranking = (config.goals, config.demonstrations, config.seed)
    named = json.dumps([_VERSION, store.digest, *of_family, BANDS, _GRADED, *of_ranking])
    digest = hashlib.blake2b(named.encode(), digest_size=8).hexdigest()
    path = store.path.with_name(f"{store.path.stem}-ranked-{digest}.npz")
    if path.exists():
        try:
            return RankedTrials(**read_npz(path, _MOST_BYTES))
        except (DataError, TypeError) as error:
            remedy = remedy_for(error, "delete it, and it will be computed again")
            raise DataError(f"{path}: {error}; {remedy}") from error
    ranked = _rank(store, config)
    with replacing(path) as beside, beside.open("wb") as file:
        np.savez(file, **vars(ranked))
    return ranked


def _rank(store: ExplorationStore, config: RankingConfig) -> RankedTrials:
    random = np.random.default_rng(config.seed)
    goals = store.family.draw_goals(random, config.goals, "seen")
    order, bounds = _cells(store, config.demonstrations)
    bands = store.family.hold * np.array(BANDS)
    demonstrations, graded = [], []
    with progress("ranking trials", config.goals) as advance:
        for returns in _returns(store, order, goals):
            best = [
                first + _best(returns[first:end], config.demonstrations) for first, end in pairwise(bounds)
            ]
            demonstrations.append(order[np.stack(best)])
            graded.append(order[_graded(returns, random, bands, goals[len(graded)])])
            advance(len(graded), "goals")
    return RankedTrials(goals, *(np.stack(each).astype(np.int32) for each in (demonstrations, graded)))


def _cells(store: ExplorationStore, least: int) -> tuple[np.ndarray, np.ndarray]:
    """The trials in the order of their start cells, and the bounds of the cells in that order, [C + 1]."""
    family = store.family
    cell = family.start_cell(store.physics[:, 0])
    counts = np.bincount(cell, minlength=family.start_cells)
    if counts.min() < least:
        raise DataError(
            f"{store.path} has {store.num_trials:,} trials, of which {counts.min()} begin in start cell "
            f"{counts.argmin()}; {least} are needed, so explore with more --trials"
        )
    return np.argsort(cell, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


def _returns(store: ExplorationStore, order: np.ndarray, goals: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the dense returns of the trials in ``order`` for one goal after another, float32 [N]."""
    cuts = range(_TRIALS_AT_A_TIME, len(order), _TRIALS_AT_A_TIME)
    paths = (store.physics[some] for some in np.split(order, cuts))
    parts = [jnp.asarray(store.family.outcomes(path), jnp.float32) for path in paths]
    for first in range(0, len(goals), _GOALS_AT_A_TIME):
        some = jnp.asarray(goals[first : first + _GOALS_AT_A_TIME], jnp.float32)
        yield from np.concatenate([_dense_returns(store.family, part, some) for part in parts], axis=1)


@partial(jax.jit, static_argnums=0)
def _dense_returns(family: Family, outcomes: jax.Array, goals: jax.Array) -> jax.Array:
    """Returns float32 [goals, trials] of outcomes [trials, S, G] for goals [goals, G]."""
    return family.dense(family.error(outcomes, goals[:, None, None])).sum(axis=-1) / family.substeps


def _best(returns: np.ndarray, count: int) -> np.ndarray:
    best = np.argpartition(returns, -count)[-count:]
    return best[np.argsort(-returns[best], kind="stable")]


def _graded(
    returns: np.ndarray, random: np.random.Generator, limits: np.ndarray, goal: np.ndarray
) -> np.ndarray:
    """Chooses graded trials of each band, int [4, 64]; see ``RankedTrials``."""
    bands = [np.flatnonzero((returns >= low) & (returns < high)) for low, high in pairwise(limits)]
    filled = [number for number, band in enumerate(bands) if len(band)]
    if not filled:
        raise DataError(
            f"no trial earns a return of {limits[0]:g} to {limits[-1]:g} for the goal {goal.tolist()}; "
            "explore with more --trials"
        )
    nearest = [max((f for f in filled if f <= number), default=filled[0]) for number in range(len(bands))]
    return np.stack([random.choice(bands[number], _GRADED) for number in nearest])
