"""One training step: the train state, its sharding, and the update with gradient accumulation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.mesh import ShardingRules
from agentic_ring.models.model import Model, Params

Loss = Callable[[Any, Any], jax.Array]
"""Takes a module and a batch with a ``weight``; returns the weighted sum to minimise, a float32 scalar.

It is a sum, not a mean, so that the losses of parts of a batch add up.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    step: jax.Array
    """int32 scalar, number of updates done."""
    params: Params
    """float32 arrays by name."""
    optimizer: Any


@dataclass(frozen=True)
class WholeState:
    """A train state that every device of a mesh has whole."""

    make: Callable[[], TrainState]
    mesh: Mesh

    def fresh(self) -> TrainState:
        """The state before the first update."""
        return jax.device_put(self.make(), self._sharding)

    def abstract(self) -> TrainState:
        """Its ShapeDtypeStructs with shardings, for restoring a checkpoint."""
        shapes = jax.eval_shape(self.make)
        return jax.tree.map(lambda leaf: leaf.update(sharding=self._sharding), shapes)

    @property
    def _sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, rules: ShardingRules
) -> TrainState:
    """The train state as ShapeDtypeStructs with shardings, for compilation and for restoring a checkpoint."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    param_shardings = model.param_shardings(mesh, rules)
    shapes = jax.eval_shape(lambda: _fresh_state(model, optimizer, jax.random.key(0)))
    optimizer_shardings = optax.tree.map_params(
        optimizer,
        lambda leaf, sharding: leaf if _masked(leaf) else sharding,
        shapes.optimizer,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=_masked,
    )
    shardings = TrainState(replicated, param_shardings, optimizer_shardings)
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)


def _masked(leaf: Any) -> bool:
    """Whether the optimiser keeps nothing for a parameter, as Muon and AdamW do for each other's."""
    return isinstance(leaf, optax.MaskedNode)


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    rules: ShardingRules,
    params: Params | None = None,
) -> TrainState:
    """Returns a fresh train state; each array is created on the devices that hold it.

    ``params`` are donated if given; otherwise they are drawn from ``seed``.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh, rules))
    if params is not None:
        return jax.jit(partial(_first_state, optimizer), out_shardings=shardings, donate_argnums=0)(params)
    return jax.jit(partial(_fresh_state, model, optimizer), out_shardings=shardings)(jax.random.key(seed))


def _fresh_state(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    return _first_state(optimizer, model.init_params(key))


def _first_state(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
    model: Model, loss: Loss, optimizer: optax.GradientTransformation, accumulation: int = 1
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the function (state, batch, frozen=None) -> (state, metrics); jit it with the state donated.

    Metrics are float32 scalars: ``loss`` (mean over the batch's total weight) and ``gradient_norm``
    (before clipping). A batch is split into ``accumulation`` parts, whose gradients are summed.
    """

    def train_step(
        state: TrainState, batch: Any, frozen: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        total_weight = jnp.maximum(jnp.sum(batch.weight), 1.0)

        def loss_share(params: Params, part: Any) -> jax.Array:
            return loss(model.bind(params, frozen), part) / total_weight

        def add_part(total: tuple, part: Any) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_share)(state.params, part)), None

        if accumulation == 1:
            mean, gradients = jax.value_and_grad(loss_share)(state.params, batch)
        else:
            nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            # [B, ...] -> [parts, B / parts, ...], strided over rows so that each row stays on its device.
            parts = jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)
            (mean, gradients), _ = jax.lax.scan(add_part, nothing, parts)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        metrics = {"loss": mean, "gradient_norm": optax.tree.norm(gradients)}
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return train_step
