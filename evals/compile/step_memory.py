"""Memory of a training step: compiles it and reads how many bytes per device it needs, and whether it fits.

For every model of this project, on the devices of this machine or on an absent one
(``evals.compile.machines``); no array is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainBatch
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.llama import TokenBatch
from agentic_ring.models.model import Model
from agentic_ring.training.losses import action_loss
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import Loss, abstract_state, make_train_step
from evals.compile.compile_target import CompileTarget
from evals.compile.machines import NamedMachine


@dataclass(frozen=True)
class TrainStep:
    """One update of a model on a mesh, ready to be lowered.

    Attributes:
      model: the model that is trained.
      loss: one of ``training.losses``.
      optimizer: settings of the optimiser.
      batch: makes the batch's shapes, dtypes and shardings without its values.
      mesh: devices, which may be absent.
      rules: how arrays are sharded over the mesh; the model's own.
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
        """Compiles the update and returns its bytes per device.

        Args:
          target: the devices of the mesh, where they are absent.

        Raises:
          DoesNotFitError: the update does not fit the target's devices.
        """
        lowered = self.lower()
        return PlannedMemory.of(lowered.compile() if target is None else target.compile(lowered))


@dataclass(frozen=True)
class Fit:
    """Whether a step fits a compile target.

    Attributes:
      fits: whether it does.
      needed: bytes per device; for a TPU program that does not fit a lower bound, if the compiler gives one.
      limit: bytes of a device that a program may use.
      memory: the plan of a step that fits.
      reason: the compiler's message about one that does not fit.
    """

    fits: bool
    needed: float | None
    limit: float
    memory: PlannedMemory | None = None
    reason: str = ""


def check_fit(step: TrainStep, target: CompileTarget) -> Fit:
    """Compiles the step for the target; errors that are not about memory pass through."""
    limit = target.hardware.limit
    try:
        memory = step.memory(target)
    except DoesNotFitError as error:
        return Fit(False, error.needed, limit, reason=str(error))
    return Fit(True, memory.total, limit, memory)


def print_memory(step: TrainStep, absent: NamedMachine | None) -> None:
    """Compiles a step and prints its bytes per device.

    Args:
      step: a step on a mesh of the absent machine's devices, or of this machine's.
      absent: the machine to compile for, if it is not this one.
    """
    fit = None if absent is None else check_fit(step, absent.compile_target())
    memory = step.memory() if fit is None else fit.memory
    if memory is not None:
        parts = f"{memory.state:,} parameters, optimiser and batch, {memory.temporary:,} temporary"
        print(f"bytes per device    {memory.total:,} ({parts})")
    if fit is not None and absent is not None:
        usable = f"a program may use {fit.limit:,.0f} bytes of each device"
        print(f"fits {absent.name}: {usable}" if fit.fits else fit.reason)


def chain_batch(model: AgenticTransformerConfig, batch_size: int, steps: int) -> Callable[..., ChainBatch]:
    """Returns ``TrainStep.batch`` for chains [batch_size, steps]."""

    def batch(mesh: Mesh, rules: ShardingRules) -> ChainBatch:
        def array(dtype: Any, *width: int) -> Any:
            return _sharded(mesh, rules, dtype, (batch_size, steps, *width))

        chain = ChainSteps(
            return_to_go=array(jnp.float32),
            observation=array(jnp.float32, model.observation_dim),
            action=array(jnp.float32, model.action_dim),
            reward=array(jnp.float32),
            completion=array(jnp.float32),
            timestep=array(jnp.int32),
            trajectory=array(jnp.int32),
            position=array(jnp.int32),
        )
        return ChainBatch(chain, weight=array(jnp.float32), seed=array(jnp.uint32), layout="zigzag")

    return batch


def chain_step(
    model: AgenticTransformerConfig, optimizer: OptimizerConfig, batch_size: int, steps: int, mesh: Mesh
) -> TrainStep:
    """Returns an update of the Agentic Transformer on ``batch_size`` chains of ``steps`` steps."""
    batch = chain_batch(model, batch_size, steps)
    return TrainStep(Model(model), action_loss, optimizer, batch, mesh, model.transformer.rules)


def token_batch(batch_size: int, tokens: int, packed: bool = False) -> Callable[..., TokenBatch]:
    """Returns ``TrainStep.batch`` for zigzag rows [batch_size, tokens]; one text per row unless packed."""

    def batch(mesh: Mesh, rules: ShardingRules) -> TokenBatch:
        def array(dtype: Any) -> Any:
            return _sharded(mesh, rules, dtype, (batch_size, tokens))

        positions = array(jnp.int32) if packed else _sharded(mesh, rules, jnp.int32, (1, tokens))
        segments = array(jnp.int32) if packed else None
        weight = array(jnp.float32)
        return TokenBatch(array(jnp.int32), array(jnp.int32), weight, positions, segments, "zigzag")

    return batch


def _sharded(mesh: Mesh, rules: ShardingRules, dtype: Any, shape: tuple[int, ...]) -> Any:
    axes = ("batch", "sequence", *(None,) * (len(shape) - 2))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, shape, axes))
