"""The data loader of chains: reads planned chains from a store and yields batches sharded over the mesh.

A batch depends only on the seed and its number. A process reads only the batch rows and the part of the
sequence that its own devices hold, already in the ring's layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention.ring.layout import Layout, order, padded_length
from agentic_ring.data.hindsight_chains import ChainPlan, completions, returns_to_go
from agentic_ring.data.sharded_batches import ShardedBatches
from agentic_ring.data.store import Scaling, TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.models.agentic_transformer import ChainBatch, ChainSteps

if TYPE_CHECKING:
    from agentic_ring.data.hidden_tasks.cue_chains import CueChains
    from agentic_ring.data.told_chains import ToldChains


@dataclass(frozen=True)
class ChainConfig:
    """Composition of the chains."""

    task: str
    """Name of the task within its domain."""
    trajectories: int
    """Number of trajectories of a chain."""
    action_repeat: int
    """Environment steps per decision; the store's actions must be held at least as long."""
    top_fraction: float = 0.2
    """See ``StratifiedSampler``."""
    loss_extent: Literal["all", "leaders"] = "leaders"
    """Trajectories that bear loss: "leaders", the demonstrations, or "all" in which a policy acted. Imitating
    poor trajectories, relabelled to the same target, teaches to act badly on purpose (docs/notebook.md)."""
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Order of the steps over the ring."""
    seed: int = 0
    """Seed of the sampling of chains."""

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
        self.length = padded_length(config.trajectories * int(self._decisions.max()), ring, config.layout)
        """Number of steps S in every chain, padding included."""
        self.order = order(config.layout, self.length, ring)
        """int [S]: the step of the chain at each position of the layout."""

    def load(self, plan: ChainPlan, columns: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Returns the steps at ``columns`` of the layout as arrays [columns, ...] by field name."""
        positions = self.order[columns]
        count, domain = len(positions), self._store.domain
        floats = ("return_to_go", "reward", "completion", "weight")
        fields: dict[str, np.ndarray] = {name: np.zeros(count, np.float32) for name in floats}
        fields["observation"] = np.zeros((count, domain.observation_dim), np.float32)
        fields["action"] = np.zeros((count, domain.action_dim), np.float32)
        fields |= {name: np.zeros(count, np.int32) for name in ("timestep", "trajectory")}
        fields["position"] = np.full(count, -1, np.int32)
        start = 0
        for index, episode in enumerate(plan.episodes):
            end = start + int(self._decisions[episode])
            own = np.flatnonzero((positions >= start) & (positions < end))
            breaks = np.flatnonzero(np.diff(positions[own]) != 1) + 1
            for run in np.split(own, breaks) if len(own) else ():
                fields["position"][run] = positions[run]
                for name, values in self._read(plan, index, positions[run] - start).items():
                    fields[name][run] = values
            start = end
        return fields

    def _read(self, plan: ChainPlan, index: int, timesteps: np.ndarray) -> dict[str, np.ndarray | int | bool]:
        """Reads consecutive ``timesteps`` (in decisions) of one trajectory of a chain."""
        config, scaling, episode = self._config, self._scaling, plan.episodes[index]
        rewards = self._store.rewards(episode, config.task)
        starts = np.arange(0, len(rewards), config.action_repeat)
        earned = np.add.reduceat(rewards.astype(np.float64), starts)
        first = int(timesteps[0]) * config.action_repeat
        last = min((int(timesteps[-1]) + 1) * config.action_repeat, len(rewards))
        steps = self._store.steps(episode, first, last, config.task)
        bears_loss = config.loss_extent == "all" or index >= len(plan.episodes) - plan.demonstrations
        return {
            "observation": scaling.observation(steps.observation[:: config.action_repeat]),
            "action": steps.action[:: config.action_repeat],
            "reward": earned[timesteps] / scaling.reward_scale,
            "return_to_go": returns_to_go(earned, plan.target)[timesteps] / scaling.return_scale,
            "completion": completions(earned, plan.target)[timesteps],
            "timestep": timesteps,
            "trajectory": index,
            "weight": bears_loss and self._store.learnable[episode],
        }


class ChainPipeline(ShardedBatches):
    """An endless iterator of ``ChainBatch``, with chains sharded over data and fsdp, steps over the ring.

    A batch has ``batch_size`` chains, over all processes. ``sampler`` plans the chain with a given number,
    and the chain's own seed is a function of this number and ``seed``.
    """

    def __init__(
        self,
        loader: "ChainLoader | CueChains | ToldChains",
        sampler: Callable[[int], Any],
        batch_size: int,
        mesh: Mesh,
        seed: int = 0,
    ):
        def chain(number: int, columns: np.ndarray) -> dict[str, np.ndarray]:
            own = np.random.SeedSequence((seed, number)).generate_state(1)
            return loader.load(sampler(number), columns) | {"seed": own.repeat(len(columns))}

        super().__init__(chain, batch_size, loader.length, mesh)
        self._layout: Layout = loader.layout

    def __next__(self) -> ChainBatch:
        """Returns the next batch, on the devices."""
        fields = self.next_fields()
        weight, seed = fields.pop("weight"), fields.pop("seed")
        return ChainBatch(ChainSteps(**fields), weight, seed, self._layout)
