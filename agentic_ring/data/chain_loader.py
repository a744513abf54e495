"""The data loader of chains: reads planned chains from a store and yields batches sharded over the mesh.

A batch depends only on the seed and its number. A process reads only the batch rows and the part of the
sequence that its own devices hold, already in the ring's layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention.ring.layout import Layout, order, padded_length
from agentic_ring.data.hindsight_chains import ChainPlan, completions, returns_to_go
from agentic_ring.data.scaling import Scaling
from agentic_ring.data.sharded_batches import ShardedBatches
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import ChainSteps


@partial(jax.tree_util.register_dataclass, data_fields=["steps", "weight", "seed"], meta_fields=["layout"])
@dataclass(frozen=True)
class ChainBatch:
    """A batch for training: steps of several chains, and the loss weight of each step's action.

    Attributes:
      steps: see ``ChainSteps``, [B, S].
      weight: float32 [B, S], 0 for steps without loss.
      seed: uint32 [B, S], the seed of each step's chain, for dropout.
      layout: order of the steps over the ring.
    """

    steps: ChainSteps
    weight: jax.Array
    seed: jax.Array
    layout: Layout


@dataclass(frozen=True)
class ChainConfig:
    """Composition of the chains.

    Attributes:
      task: name of the task within its domain.
      trajectories: number of members of a chain.
      action_repeat: environment steps per decision; the store's actions must be held at least as long.
      top_fraction: see ``StratifiedSampler``.
      loss_extent: members that bear loss: "leaders", the best ones at the end of a chain, or "all" in which a
        policy acted. A poor member is relabelled to the same target as the leaders, so imitating it as well
        teaches the model to act badly on purpose (measured in docs/notebook.md).
      layout: order of the steps over the ring.
      seed: seed of the sampling of chains.
    """

    task: str
    trajectories: int
    action_repeat: int
    top_fraction: float = 0.2
    loss_extent: Literal["all", "leaders"] = "leaders"
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")


class ChainLoader:
    """Reads chosen steps of planned chains from a store.

    Raises:
      DataError: some of the store's actions are not held for ``action_repeat`` steps.
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
        """Number of steps S in every chain, padding included."""
        self.order = order(config.layout, self.length, ring)
        """int [S]: the step of the chain at each position of the layout."""

    def load(self, plan: ChainPlan, columns: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Returns the steps at ``columns`` of the layout as arrays [columns, ...] by field name."""
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
        """Fills ``run`` with consecutive ``timesteps`` (in decisions) of one member."""
        config, episode = self._config, plan.episodes[index]
        scaling = self._scaling
        rewards = self._store.rewards(episode, config.task)
        starts = np.arange(0, len(rewards), config.action_repeat)
        earned = np.add.reduceat(rewards.astype(np.float64), starts)
        first = int(timesteps[0]) * config.action_repeat
        last = min((int(timesteps[-1]) + 1) * config.action_repeat, len(rewards))
        steps = self._store.steps(episode, first, last, config.task)
        fields["observation"][run] = scaling.observation(steps.observation[:: config.action_repeat])
        fields["action"][run] = steps.action[:: config.action_repeat]
        fields["reward"][run] = earned[timesteps] / scaling.reward_scale
        fields["return_to_go"][run] = returns_to_go(earned, plan.target)[timesteps] / scaling.return_scale
        fields["completion"][run] = completions(earned, plan.target)[timesteps]
        fields["timestep"][run] = timesteps
        fields["trajectory"][run] = index
        bears_loss = config.loss_extent == "all" or index >= len(plan.episodes) - plan.leaders
        fields["weight"][run] = bears_loss and self.learnable[episode]


def _consecutive_runs(selected: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
    """Splits ``selected`` into runs of positions that hold consecutive steps."""
    if not len(selected):
        return []
    return np.split(selected, np.flatnonzero(np.diff(places[selected]) != 1) + 1)


PlanT = TypeVar("PlanT", contravariant=True)


class ChainReader(Protocol[PlanT]):
    """Reads chosen steps of planned chains, as ``ChainLoader`` does.

    Attributes:
      length: number of steps S in every chain, padding included.
      layout: order of the steps over the ring.
    """

    length: int
    layout: Layout

    def load(self, plan: PlanT, columns: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the steps at ``columns`` of the layout as arrays [columns, ...] by field name."""
        ...


Plan = TypeVar("Plan")


class ChainPipeline(ShardedBatches):
    """An endless iterator of ``ChainBatch``, with chains sharded over data and fsdp, steps over the ring.

    A batch has ``batch_size`` chains, over all processes. ``sampler`` plans the chain with a given number,
    and the chain's own seed is a function of this number and ``seed``.
    """

    def __init__(
        self,
        loader: ChainReader[Plan],
        sampler: Callable[[int], Plan],
        batch_size: int,
        mesh: Mesh,
        rules: ShardingRules = ShardingRules(),
        seed: int = 0,
    ):
        def chain(number: int, columns: np.ndarray) -> dict[str, np.ndarray]:
            own = np.random.SeedSequence((seed, number)).generate_state(1)
            return loader.load(sampler(number), columns) | {"seed": own.repeat(len(columns))}

        super().__init__(chain, batch_size, loader.length, mesh, rules)
        self._layout: Layout = loader.layout

    def __iter__(self) -> Iterator[ChainBatch]:
        return self

    def __next__(self) -> ChainBatch:
        """Returns the next batch, on the devices."""
        fields = self.next_fields()
        weight, seed = fields.pop("weight"), fields.pop("seed")
        return ChainBatch(ChainSteps(**fields), weight, seed, self._layout)
