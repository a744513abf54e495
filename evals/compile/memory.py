"""Does a train step fit a machine? Compile it, and ask the compiler how many bytes a device needs.

For any model of the product, on the devices that are there or on a machine that is not
(``evals.compile.machines``); no array is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainBatch
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.llama import TokenBatch
from agentic_ring.models.model import Model
from agentic_ring.training.losses import action_loss
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import Loss, abstract_state, make_train_step
from evals.compile.hardware import DoesNotFitError, Machine


@dataclass(frozen=True)
class StepMemory:
    """What the compiler plans for one device, in bytes.

    Attributes:
      state: parameters, optimiser state and the batch; the new state takes the place of the old.
      temporary: everything else that is alive at once.
      host: what waits in the host's memory for this device, under ``remat="offload"``.
    """

    state: int
    temporary: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes a device must have."""
        return self.state + self.temporary

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "StepMemory":
        """As the compiled program says."""
        plan: Any = compiled.memory_analysis()
        return cls(
            state=plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes,
            temporary=plan.temp_size_in_bytes,
            host=plan.host_temp_size_in_bytes + plan.host_argument_size_in_bytes,
        )


@dataclass(frozen=True)
class TrainStep:
    """One update of a model, and what it runs on.

    Attributes:
      model: what is trained.
      loss: one of ``training.losses``.
      optimizer: its settings.
      batch: makes the batch's shapes, dtypes and shardings without its values.
      mesh: of devices that may be absent.
      rules: how arrays lie on it; the model's own.
    """

    model: Model
    loss: Loss
    optimizer: OptimizerConfig
    batch: Callable[[Mesh, ShardingRules], Any]
    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    def lower(self) -> jax.stages.Lowered:
        """The update, lowered for its devices, with the state donated."""
        transformation = make_optimizer(self.optimizer, steps=1)
        update = make_train_step(self.model, self.loss, transformation, self.optimizer.accumulation)
        # Before the mesh is set: optax makes a scalar here, which devices that are absent cannot hold.
        state = abstract_state(self.model, transformation, self.mesh, self.rules)
        frozen = self.model.abstract_frozen(self.mesh, self.rules)
        with jax.set_mesh(self.mesh):
            batch = self.batch(self.mesh, self.rules)
            others = (batch,) if frozen is None else (batch, frozen)
            return jax.jit(update, donate_argnums=0).lower(state, *others)

    def memory(self, machine: Machine | None = None) -> StepMemory:
        """Bytes a device, on the devices that are there or on a machine whose devices the mesh has.

        Raises:
          DoesNotFitError: the machine's compiler finds that it does not fit.
        """
        lowered = self.lower()
        return StepMemory.of(lowered.compile() if machine is None else machine.compile(lowered))


@dataclass(frozen=True)
class Answer:
    """Whether a step fits.

    Attributes:
      fits: the answer.
      needed: bytes a device; of a TPU program that does not fit at least so many, if its compiler says.
      limit: bytes that a program may use of a device.
      memory: the plan of a step that fits.
      reason: the compiler's words where it does not fit.
    """

    fits: bool
    needed: float | None
    limit: float
    memory: StepMemory | None = None
    reason: str = ""


def fits(step: TrainStep, machine: Machine) -> Answer:
    """Compiles the step for the machine; errors that are not about memory pass through."""
    limit = machine.hardware.limit
    try:
        memory = step.memory(machine)
    except DoesNotFitError as error:
        return Answer(False, error.needed, limit, reason=str(error))
    return Answer(True, memory.total, limit, memory)


def chain_batch(model: AgenticTransformerConfig, batch_size: int, steps: int) -> Callable[..., ChainBatch]:
    """``TrainStep.batch`` for chains [batch_size, steps]."""

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
        return ChainBatch(chain, weight=array(jnp.float32), layout="zigzag")

    return batch


def chain_step(
    model: AgenticTransformerConfig, optimizer: OptimizerConfig, batch_size: int, steps: int, mesh: Mesh
) -> TrainStep:
    """An update of the Agentic Transformer on ``batch_size`` chains of ``steps`` steps."""
    batch = chain_batch(model, batch_size, steps)
    return TrainStep(Model(model), action_loss, optimizer, batch, mesh, model.transformer.rules)


def token_batch(batch_size: int, tokens: int, packed: bool = False) -> Callable[..., TokenBatch]:
    """``TrainStep.batch`` for rows [batch_size, tokens] in zigzag order, of one text each unless packed."""

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
