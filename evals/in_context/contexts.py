"""Contexts of stored trajectories for a trial in a hidden task, and the controls that each spoil one thing.

right       earlier members of one of the task's chains, as training has them
wrong       the same of another task, paid for that other task
zeroed      the right one without any pay: rewards 0, returns-to-go held at the target
shuffled    the right one, its steps in random order
descending  the right one, its members in the opposite order
"""

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader
from agentic_ring.data.hindsight_chains import ChainPlan
from agentic_ring.data.scaling import Scaling
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.task_family import TaskFamilySampler
from agentic_ring.errors import ConfigError
from agentic_ring.models.agentic_transformer import ChainSteps

Context = Literal["right", "wrong", "zeroed", "shuffled", "descending"]
CONTEXTS: tuple[Context, ...] = get_args(Context)


class StoredContexts:
    """Makes contexts of one trajectory less than a chain.

    Args:
      store: of trajectories.
      config: of the chains that the model was trained on.
      sampler: draws chains of hidden tasks.
      scaling: that of the training data.
      ring: devices that a context is sharded over.

    Raises:
      ConfigError: a chain has no earlier members.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        config: ChainConfig,
        sampler: TaskFamilySampler,
        scaling: Scaling,
        ring: int,
    ):
        if config.trajectories < 2:
            raise ConfigError("chains of 1 trajectory have no context; use longer ones")
        earlier = replace(config, trajectories=config.trajectories - 1, layout="contiguous")
        self._loader = ChainLoader(store, earlier, scaling, ring)
        self._sampler = sampler
        self._tasks = config.hidden_tasks

    def plan(self, task: str, context: Context, number: int) -> ChainPlan:
        """The members of context ``number`` of a trial in ``task``."""
        if context == "wrong":
            others = [other for other in self._tasks if other != task]
            task = others[number % len(others)]
        chain = self._sampler(number, task)
        episodes = chain.episodes[:-1]
        return replace(chain, episodes=episodes[::-1] if context == "descending" else episodes)

    def steps(self, task: str, context: Context, number: int) -> ChainSteps:
        """The context as steps [1, S], padding last; its target, scaled, is 1."""
        fields = self._loader.load(self.plan(task, context, number), slice(0, self._loader.length))
        real = np.flatnonzero(fields["position"] >= 0)
        steps: dict[str, Any] = {name: array for name, array in fields.items() if name != "weight"}
        if context == "zeroed":
            for name in ("reward", "completion"):
                steps[name] = np.zeros_like(steps[name])
            steps["return_to_go"] = np.where(steps["position"] >= 0, np.float32(1), np.float32(0))
        if context == "shuffled":
            order = np.random.default_rng(number).permutation(real)
            for name in steps.keys() - {"position"}:
                steps[name][real] = steps[name][order]
        return ChainSteps(**{name: array[None] for name, array in steps.items()})
