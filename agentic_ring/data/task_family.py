"""Chains of which each draws one of several tasks: only the rewards in its context tell which.

The trajectories of a domain serve all its tasks, each with rewards of its own. A chain ends with one or
more of the best of its task and begins with others: with the best of another task, which earn little
here, and with what is not among the best of any. So what a good member does cannot be told from how good
the earlier ones look, but from what they were paid for.
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
    """Draws a chain's task, how many of its best members it ends with, and the members.

    A chain of N ends with 1 to N of the best of its task, each as likely, and all of them bear loss. So
    every place of a chain bears loss, the first as well, where nothing can tell the task, behind contexts
    of bad and of good trials, and nothing is spent on padding. The best are drawn one by one: one may stand
    in a chain twice, as a policy that does well repeats itself.

    Args:
      returns: float64 [E] by task.
      targets: by task, what all members are told to aim at, whatever the members' returns are.
      may_lead, length, top_fraction, seed: as in ``StratifiedSampler``.

    Raises:
      ConfigError: fewer than two tasks, or a bad ``length`` or ``top_fraction``.
      DataError: as in ``StratifiedSampler``; or no trajectory is worse at a task than its best ones.
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
            raise ConfigError(f"hidden tasks are {self._tasks}; name at least two to choose among")
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
            # What did as well as a leader is left out, be it noise: it could end up last.
            below = np.flatnonzero(returns[task] < returns[task][best[0]])
            self._earlier[task] = np.intersect1d(below, of_any), np.setdiff1d(below, of_any)
            if not len(below):
                raise DataError(f"all trajectories are as good at {task} as its best ones; collect others")

    def __call__(self, index: int, task: str | None = None) -> ChainPlan:
        """The chain number ``index``; of ``task`` where one is given."""
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
    """The sampler of a store's chains, of one task or of hidden ones."""
    if not config.hidden_tasks:
        return StratifiedSampler(
            store.returns(config.task), store.learnable, config.trajectories, config.top_fraction, config.seed
        )
    return make_family_sampler(store, config, scaling)


def make_family_sampler(store: TrajectoryStore, config: ChainConfig, scaling: Scaling) -> TaskFamilySampler:
    """The sampler of a store's chains of hidden tasks."""
    return TaskFamilySampler(
        {task: store.returns(task) for task in config.hidden_tasks},
        {task: scaling.for_task(task).return_scale for task in config.hidden_tasks},
        store.learnable,
        config.trajectories,
        config.top_fraction,
        config.seed,
    )
