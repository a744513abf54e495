"""Bytes a device needs for a train step: compile it, and ask the compiler."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.data.chains import ChainBatch
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.training.state import (
    Model,
    OptimizerConfig,
    abstract_state,
    make_optimizer,
    make_train_step,
)


@dataclass(frozen=True)
class StepMemory:
    """What the compiler plans for one device, in bytes.

    Attributes:
      state: parameters, optimiser state and the batch; the new state takes the place of the old.
      temporary: everything else that is alive at once.
    """

    state: int
    temporary: int

    @property
    def total(self) -> int:
        """Bytes a device must have."""
        return self.state + self.temporary


def abstract_batch(model: Model, batch_size: int, steps: int, mesh: Mesh, rules: ShardingRules) -> ChainBatch:
    """The shapes, dtypes and shardings of a batch [batch_size, steps] of chains, without its values."""

    def array(dtype: Any, *width: int) -> Any:
        shape = (batch_size, steps, *width)
        axes = ("batch", "sequence", *(None,) * len(width))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, shape, axes))

    chain = ChainSteps(
        return_to_go=array(jnp.float32),
        observation=array(jnp.float32, model.config.observation_dim),
        action=array(jnp.float32, model.config.action_dim),
        reward=array(jnp.float32),
        completion=array(jnp.float32),
        timestep=array(jnp.int32),
        trajectory=array(jnp.int32),
        position=array(jnp.int32),
    )
    return ChainBatch(chain, weight=array(jnp.float32))


def train_step_memory(
    model: Model,
    optimizer: OptimizerConfig,
    batch_size: int,
    steps: int,
    mesh: Mesh,
    rules: ShardingRules = ShardingRules(),
) -> StepMemory:
    """Compiles one update of ``model`` on ``batch_size`` chains of ``steps`` steps; makes no array."""
    transformation = make_optimizer(optimizer, steps=1)
    with jax.set_mesh(mesh):
        state = abstract_state(model, transformation, mesh, rules)
        batch = abstract_batch(model, batch_size, steps, mesh, rules)
        update = jax.jit(make_train_step(model, transformation, optimizer.accumulation), donate_argnums=0)
        analysis: Any = update.lower(state, batch).compile().memory_analysis()
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return StepMemory(state=kept, temporary=analysis.temp_size_in_bytes)
