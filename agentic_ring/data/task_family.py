"""Chains of a task family: each chain draws one of several tasks, which only the rewards in it reveal.

The trajectories of a domain are relabelled with the rewards of each of its tasks. A chain ends with one or
more of the best trajectories of its task. The earlier members are the best of other tasks, which earn little
in this one, and trajectories that are not among the best of any task. So skilful movement in the context says
nothing about the task; only its rewards do.
"""

from collections.abc import Mapping

import numpy as np

from agentic_ring.data.chain_loader import ChainConfig
from agentic_ring.data.hindsight_chains import ChainPlan, Sampler, StratifiedSampler, plan_chain, top_episodes
from agentic_ring.data.scaling import Scaling
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import ConfigError, DataError

CONTRAST = 0.5
"""Share of the earlier members that are among the best of another task."""


class TaskFamilySampler:
    """Draws a chain's task, the number of its best members at the end, and the members.

    A chain of N members ends with 1 to N of the best of its task, each number with equal probability, and all
    of these bear loss. So every position in a chain can bear loss, after contexts of good and of bad trials
    and without any context, and no computation is spent on padding. The best are drawn independently: one may
    occur twice in a chain, as a good policy repeats itself.

    Args:
      returns: float64 [E] by task.
      targets: target return of all members by task, independent of the members' returns.
      may_lead, length, top_fraction, seed: as in ``StratifiedSampler``.

    Raises:
      ConfigError: fewer than two tasks, or a bad ``length`` or ``top_fraction``.
      DataError: as in ``StratifiedSampler``, or all trajectories are among the best of a task.
    """

    def __init__(
        self,
        returns: Mapping[str, np.ndarray],
        targets: Mapping[str, float],
        may_lead: np.ndarray,
        length: int,
        top_fraction: float,
        seed: int,
    ):
        self._tasks = tuple(returns)
        if len(self._tasks) < 2:
            raise ConfigError(f"the task family is {self._tasks}; name at least two tasks")
        self._returns = returns
        self._targets = targets
        self._length = length
        self._seed = seed
        self._best = {
            task: top_episodes(returns[task], may_lead, length, top_fraction) for task in self._tasks
        }
        of_any = np.concatenate(list(self._best.values()))
        self._earlier: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for task, best in self._best.items():
            # A trajectory that did as well as a leader, be it noise, could end up last, so it is left out.
            below = np.flatnonzero(returns[task] < returns[task][best[0]])
            self._earlier[task] = np.intersect1d(below, of_any), np.setdiff1d(below, of_any)
            if not len(below):
                raise DataError(f"all trajectories are as good at {task} as its best ones; collect others")

    def __call__(self, index: int, task: str | None = None) -> ChainPlan:
        """Plans the chain with this index; ``task`` replaces the drawn task."""
        random = np.random.default_rng((self._seed, index))
        drawn = self._tasks[random.integers(len(self._tasks))]
        task = task or drawn
        leaders = int(random.integers(1, self._length + 1))
        earlier = [self._draw_earlier(task, random) for _ in range(self._length - leaders)]
        best = random.choice(self._best[task], leaders)
        episodes = plan_chain(self._returns[task], np.array([*earlier, *best])).episodes
        return ChainPlan(episodes, self._targets[task], task, leaders)

    def _draw_earlier(self, task: str, random: np.random.Generator) -> int:
        of_another, of_none = self._earlier[task]
        first, second = (of_another, of_none) if random.random() < CONTRAST else (of_none, of_another)
        return random.choice(first if len(first) else second)


def make_sampler(store: TrajectoryStore, config: ChainConfig, scaling: Scaling) -> Sampler:
    """Makes the sampler of a store's chains, of a single task or of a task family."""
    if not config.hidden_tasks:
        return StratifiedSampler(
            store.returns(config.task), store.learnable, config.trajectories, config.top_fraction, config.seed
        )
    return make_family_sampler(store, config, scaling)


def make_family_sampler(store: TrajectoryStore, config: ChainConfig, scaling: Scaling) -> TaskFamilySampler:
    """Makes the sampler of a store's chains of a task family."""
    return TaskFamilySampler(
        {task: store.returns(task) for task in config.hidden_tasks},
        {task: scaling.for_task(task).return_scale for task in config.hidden_tasks},
        store.learnable,
        config.trajectories,
        config.top_fraction,
        config.seed,
    )
