"""Offline TD3 and TD3+BC on stored transitions.

The set-up is that of ExoRL (denisyarats/exorl: ``agent/td3.py``, ``agent/td3_bc.py``) with the networks and
updates of this project's exploration agents. Differences from ExoRL: a target actor, and only the first
critic in the actor's gradient, as in the TD3 paper; every hidden layer is normalised, not only the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.data.transition_dataset import RandomBatches, TransitionDataset
from agentic_ring.errors import ConfigError
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import run_updates
from agentic_ring.training.metrics_log import MetricsLog
from agentic_ring.training.td3 import TD3Config, TD3State, init_population, temporal_difference, update
from agentic_ring.training.train_config import TrainConfig
from agentic_ring.training.train_step import TrainState


@dataclass(frozen=True)
class OfflineTD3Config:
    """Hyperparameters and length of training.

    Attributes:
      learner: hyperparameters of TD3; ``horizon`` is 1, since stored transitions are sampled one by one.
      updates: number of actor updates; critics have ``learner.policy_delay`` times as many.
      updates_per_call: actor updates per compiled call; the loss is checked after each call.
      checkpoint_every: actor updates between two checkpoints.
      seed: seed of weights, batches and target noise.
    """

    learner: TD3Config
    updates: int
    updates_per_call: int = 50
    checkpoint_every: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.learner.horizon != 1:
            raise ConfigError(
                f"horizon is {self.learner.horizon}; stored transitions have one decision, so use 1"
            )
        for name in ("updates", "checkpoint_every"):
            value = getattr(self, name)
            if self.updates_per_call < 1 or value < 1 or value % self.updates_per_call:
                raise ConfigError(
                    f"{name} is {value}; expected a multiple of updates_per_call {self.updates_per_call}"
                )

    @property
    def loop(self) -> TrainConfig:
        """The settings for ``run_updates``, counted in calls."""
        calls = self.updates // self.updates_per_call
        return TrainConfig(
            calls, self.learner.batch, checkpoint_every=self.checkpoint_every // self.updates_per_call
        )


def train_td3(
    config: OfflineTD3Config,
    data: TransitionDataset,
    mesh: Mesh,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
    measure: Callable[[TD3State], dict[str, float]] | None = None,
) -> TD3State:
    """Trains one agent, resuming from the newest checkpoint; its arrays have a leading axis 1.

    ``measure`` is that of ``run_updates``, of the agent.

    Raises:
      NonFiniteLossError: the values diverged.
      CheckpointError: the newest checkpoint cannot be read.
    """
    learner = config.learner
    shape = (config.updates_per_call, learner.policy_delay, 1, learner.batch)
    dims = data.observation.shape[1], data.action.shape[1]
    everywhere = NamedSharding(mesh, PartitionSpec())

    def fresh() -> TrainState:
        state = init_population(learner, *dims, jnp.array([config.seed]))
        return jax.device_put(TrainState(jnp.zeros((), jnp.int32), state._asdict(), ()), everywhere)

    def like() -> TrainState:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
            jax.eval_shape(fresh),
        )

    def improve(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        learned = update(learner, TD3State(**state.params), batch)
        last = {name: array[-1, -1] for name, array in batch.items()}
        loss = temporal_difference(learner, learned, last)[0]
        return TrainState(state.step + 1, learned._asdict(), ()), {"loss": loss}

    with jax.set_mesh(mesh):
        state = run_updates(
            config.loop,
            improve,
            fresh,
            like,
            RandomBatches(lambda generator: data.transitions(generator, shape), config.seed),
            checkpoints,
            metrics,
            learning_rate=lambda _: learner.learning_rate,
            tokens=lambda batch: batch["reward"].size,
            measure=measure and (lambda state: measure(TD3State(**state.params))),
        )
    return TD3State(**state.params)
