"""The input pipeline: chain plans in, batches of the steps that this process holds out.

Everything about a batch follows from the seed and the batch's number. A process reads only the batch
rows and the stretch of the sequence that its own devices hold, already in the ring's layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention.ring.layout import Layout, order, padded_length
from agentic_ring.data.hindsight_chains import ChainPlan, Sampler, completions, returns_to_go
from agentic_ring.data.scaling import Scaling
from agentic_ring.data.sharded_batches import ShardedBatches
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import ChainSteps


@partial(jax.tree_util.register_dataclass, data_fields=["steps", "weight"], meta_fields=["layout"])
@dataclass(frozen=True)
class ChainBatch:
    """Steps of several chains, and how much each step's action counts in the loss.

    Attributes:
      steps: see ``ChainSteps``, [B, S].
      weight: float32 [B, S], 0 where there is no loss, else 1, or more in an opening.
      layout: the order of the steps over the ring.
    """

    steps: ChainSteps
    weight: jax.Array
    layout: Layout


@dataclass(frozen=True)
class ChainConfig:
    """What a chain is made of.

    Attributes:
      task: the task's name within its domain; of hidden tasks, the first.
      trajectories: members of a chain.
      action_repeat: environment steps that one decision lasts; the data must hold its actions as long.
      top_fraction: see ``StratifiedSampler``.
      loss_extent: which members bear loss, the "last" and best one (of hidden tasks: every one that is
        among the best of the data) or "all" that a policy acted in.
        A poor member aims, in hindsight, at the same return as the good one: imitating it as well
        teaches the model to act badly on purpose (measured in docs/notebook.md).
      layout: order of the steps over the ring.
      seed: decides every chain.
      opening: decisions at a member's start that count in the loss as much as all its others together; 0
        counts all alike. Which of several hidden tasks it is shows in a body's movement soon, and only
        before that is there something to learn from the context.
      hidden_tasks: tasks of which each chain draws one; nothing but its rewards tells which. None: all
        chains are of ``task``.
    """

    task: str
    trajectories: int
    action_repeat: int
    top_fraction: float = 0.2
    loss_extent: Literal["all", "last"] = "last"
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    seed: int = 0
    opening: int = 0
    hidden_tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")


class ChainLoader:
    """Reads chosen steps of planned chains from a store.

    Raises:
      DataError: some actions of the store are not held for ``action_repeat`` steps.
    """

    def __init__(self, store: TrajectoryStore, config: ChainConfig, scaling: Scaling, ring: int):
        store.require_held(config.action_repeat)
        self._store = store
        self._config = config
        self._scaling = scaling
        self.layout: Layout = config.layout
        self._decisions = -(-store.lengths // config.action_repeat)
        self.learnable = store.learnable
        longest = int(self._decisions.max())
        self.length = padded_length(config.trajectories * longest, ring, config.layout)
        """Steps S of every chain, padding included."""
        self.order = order(config.layout, self.length, ring)
        """int [S]: the step of the chain that stands at each place."""

    def load(self, plan: ChainPlan, columns: slice) -> dict[str, np.ndarray]:
        """The steps that stand at ``columns`` of the layout, arrays [columns, ...] by field name."""
        places = self.order[columns]
        fields = self._padding(len(places))
        start = 0
        for index, episode in enumerate(plan.episodes):
            end = start + int(self._decisions[episode])
            for run in _consecutive_runs(np.flatnonzero((places >= start) & (places < end)), places):
                self._read(fields, plan, index, places[run] - start, run)
                fields["position"][run] = places[run]
            start = end
        return fields

    def _padding(self, count: int) -> dict[str, np.ndarray]:
        domain = self._store.domain
        floats = ("return_to_go", "reward", "completion", "weight")
        fields: dict[str, np.ndarray] = {name: np.zeros(count, np.float32) for name in floats}
        fields["observation"] = np.zeros((count, domain.observation_dim), np.float32)
        fields["action"] = np.zeros((count, domain.action_dim), np.float32)
        fields["timestep"] = np.zeros(count, np.int32)
        fields["trajectory"] = np.zeros(count, np.int32)
        fields["position"] = np.full(count, -1, np.int32)
        return fields

    def _read(
        self,
        fields: dict[str, np.ndarray],
        plan: ChainPlan,
        index: int,
        timesteps: np.ndarray,
        run: np.ndarray,
    ) -> None:
        """Fills ``run`` with the consecutive ``timesteps`` (in decisions) of one member."""
        config, episode = self._config, plan.episodes[index]
        task = plan.task or config.task
        scaling = self._scaling.for_task(task)
        rewards = self._store.rewards(episode, task)
        starts = np.arange(0, len(rewards), config.action_repeat)
        earned = np.add.reduceat(rewards.astype(np.float64), starts)
        first = int(timesteps[0]) * config.action_repeat
        last = min((int(timesteps[-1]) + 1) * config.action_repeat, len(rewards))
        steps = self._store.steps(episode, first, last, task)
        fields["observation"][run] = scaling.observation(steps.observation[:: config.action_repeat])
        fields["action"][run] = steps.action[:: config.action_repeat]
        fields["reward"][run] = earned[timesteps] / scaling.reward_scale
        fields["return_to_go"][run] = returns_to_go(earned, plan.target)[timesteps] / scaling.return_scale
        fields["completion"][run] = completions(earned, plan.target)[timesteps]
        fields["timestep"][run] = timesteps
        fields["trajectory"][run] = index
        bears_loss = config.loss_extent == "all" or index >= len(plan.episodes) - plan.leaders
        fields["weight"][run] = bears_loss and self.learnable[episode]
        if config.opening:
            others = max(1, int(self._decisions[episode]) - config.opening)
            fields["weight"][run[timesteps < config.opening]] *= others / config.opening


def _consecutive_runs(selected: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
    """Cuts ``selected`` where the steps that stand there are not consecutive."""
    if not len(selected):
        return []
    return np.split(selected, np.flatnonzero(np.diff(places[selected]) != 1) + 1)


class ChainPipeline(ShardedBatches):
    """Batches of chains as global arrays, batch rows over data and fsdp, steps over the ring.

    Args:
      loader: reads the store.
      sampler: the plan of each chain.
      batch_size: chains of all processes together.
      mesh, rules: where the arrays go.
    """

    def __init__(
        self,
        loader: ChainLoader,
        sampler: Sampler,
        batch_size: int,
        mesh: Mesh,
        rules: ShardingRules = ShardingRules(),
    ):
        def chain(number: int, columns: slice) -> dict[str, np.ndarray]:
            return loader.load(sampler(number), columns)

        super().__init__(chain, batch_size, loader.length, mesh, rules)
        self._layout: Layout = loader.layout

    def __iter__(self) -> Iterator[ChainBatch]:
        return self

    def __next__(self) -> ChainBatch:
        """The next batch, on the devices."""
        fields = self.next_fields()
        weight = fields.pop("weight")
        return ChainBatch(ChainSteps(**fields), weight, self._layout)
