"""Small exploration stores for tests."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.ranked_trials import RankedTrials, RankingConfig, rank_trials
from data_prep.explore import ExploreConfig, explore


@cache
def explored(family: str, trials: int = 2000) -> ExplorationStore:
    """A store that all tests of a process share."""
    folder = Path(mkdtemp(prefix="agentic_ring_exploration"))
    return ExplorationStore.open(explore(ExploreConfig(family, trials, seed=1, data=folder)))


@cache
def ranked(family: str) -> RankedTrials:
    """Its ranking for a pool of 60 goals, with 3 demonstrations for each start cell."""
    return rank_trials(explored(family), RankingConfig(goals=60, demonstrations=3))
