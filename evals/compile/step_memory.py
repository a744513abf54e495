"""Memory of a training step, compiled for devices of this machine or absent ones; no array is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import (
    AgenticTransformerConfig,
    ChainBatch,
    ChainSteps,
    action_loss,
)
from agentic_ring.models.model import Model
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import Loss, abstract_state, make_train_step
from evals.compile.machines import CompileTarget, NamedMachine


@dataclass(frozen=True)
class TrainStep:
    """One update of a model on a mesh of devices, which may be absent; ready to be lowered.

    ``batch`` makes the batch's shapes, dtypes and shardings without its values.
    """

    model: Model
    loss: Loss
    optimizer: OptimizerConfig
    batch: Callable[[Mesh, ShardingRules], Any]
    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    def lower(self) -> jax.stages.Lowered:
        """Lowers the update for its devices, with the state donated."""
        transformation = make_optimizer(self.optimizer, steps=1)
        update = make_train_step(self.model, self.loss, transformation, self.optimizer.accumulation)
        # Before the mesh is set: optax makes a scalar here, which absent devices cannot hold.
        state = abstract_state(self.model, transformation, self.mesh, self.rules)
        frozen = self.model.abstract_frozen(self.mesh, self.rules)
        with jax.set_mesh(self.mesh):
            batch = self.batch(self.mesh, self.rules)
            others = (batch,) if frozen is None else (batch, frozen)
            return jax.jit(update, donate_argnums=0).lower(state, *others)

    def memory(self, target: CompileTarget | None = None) -> PlannedMemory:
        """Compiles the update, for the target if the mesh's devices are absent; returns bytes per device."""
        lowered = self.lower()
        return PlannedMemory.of(lowered.compile() if target is None else target.compile(lowered))


def print_memory(step: TrainStep, absent: NamedMachine | None) -> None:
    """Compiles a step and prints its bytes per device, and whether it fits the mesh's machine if absent."""
    try:
        memory = step.memory(None if absent is None else absent.compile_target())
    except DoesNotFitError as error:
        print(error)
        return
    parts = f"{memory.state:,} parameters, optimiser and batch, {memory.temporary:,} temporary"
    print(f"bytes per device    {memory.total:,} ({parts})")
    if absent is not None:
        print(f"fits {absent.name}: a program may use {absent.hardware.limit:,.0f} bytes of each device")


def chain_step(
    model: AgenticTransformerConfig, optimizer: OptimizerConfig, batch_size: int, steps: int, mesh: Mesh
) -> TrainStep:
    """Returns an update of the Agentic Transformer on ``batch_size`` chains of ``steps`` steps."""

    def batch(mesh: Mesh, rules: ShardingRules) -> ChainBatch:
        def array(dtype: Any, *width: int) -> Any:
            return sharded_shape(mesh, rules, dtype, (batch_size, steps, *width))

        number, index = array(jnp.float32), array(jnp.int32)
        chain = ChainSteps(
            return_to_go=number,
            observation=array(jnp.float32, model.observation_dim),
            action=array(jnp.float32, model.action_dim),
            reward=number,
            completion=number,
            timestep=index,
            trajectory=index,
            position=index,
            span_reward=number if model.single_tokens else None,
        )
        return ChainBatch(chain, weight=number, seed=array(jnp.uint32), layout="zigzag")

    return TrainStep(Model(model), action_loss, optimizer, batch, mesh, model.transformer.rules)


def sharded_shape(mesh: Mesh, rules: ShardingRules, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Returns the shape [batch, sequence, ...], dtype and sharding of an array that is not made."""
    axes = ("batch", "sequence", *(None,) * (len(shape) - 2))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, shape, axes))
