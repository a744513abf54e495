"""The train state, where it lives on the mesh, and one update of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.errors import ConfigError
from agentic_ring.mesh import ShardingRules

Params = dict[str, Any]
Config = TypeVar("Config", bound="Buildable")
Loss = Callable[[Any, Any], jax.Array]
"""From a module and a batch that has a ``weight``: the weighted sum to minimise, a float32 scalar."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warmup, cosine decay and clipping."""

    learning_rate: float = 1e-4
    warmup_steps: int = 100
    final_fraction: float = 0.1
    """The learning rate at the last step, as a share of its peak."""
    weight_decay: float = 1e-4
    clip_norm: float = 0.25
    """Global norm that gradients are clipped to, as in Decision and Agentic Transformer."""
    beta2: float = 0.999
    accumulation: int = 1
    """Parts a batch is cut into; their gradients add up to those of the whole."""

    def __post_init__(self) -> None:
        if self.accumulation < 1 or self.learning_rate <= 0 or self.clip_norm <= 0:
            raise ConfigError(
                f"accumulation {self.accumulation}, learning_rate {self.learning_rate} and clip_norm "
                f"{self.clip_norm} must all be positive"
            )


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "optimizer"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """All that an update changes.

    Attributes:
      step: int32 scalar, updates done.
      params: float32 arrays by name.
      optimizer: optax's state.
    """

    step: jax.Array
    params: Params
    optimizer: Any


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warmup from 0, then a cosine to ``final_fraction`` of the peak at the last step."""
    warmup = min(config.warmup_steps, max(steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(steps, 1), config.learning_rate * config.final_fraction
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; weights that multiply decay, biases and norm scales do not."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=partial(jax.tree_util.tree_map_with_path, _decays),
        ),
    )


def _decays(path: tuple, _: jax.Array) -> bool:
    return path[-1].key not in ("bias", "scale")


class Buildable(Protocol):
    """The configuration of a model."""

    def build(self, key: jax.Array) -> nnx.Module:
        """The module with fresh parameters."""
        ...


class Model(Generic[Config]):
    """A module's structure apart from its parameters, and where each parameter lives.

    Args:
      config: of the module.
    """

    def __init__(self, config: Config):
        self.config = config
        abstract = jax.eval_shape(lambda: config.build(jax.random.key(0)))
        self.graphdef, self._abstract = nnx.split(abstract)

    def bind(self, params: Params, frozen: Params | None = None) -> Any:
        """The module with these parameters; a model whose weights are all trained has no ``frozen`` ones."""
        return nnx.merge(self.graphdef, params)

    def init_params(self, key: jax.Array) -> Params:
        """Fresh parameters; call under jit to have them made where they belong."""
        return nnx.to_pure_dict(nnx.split(self.config.build(key))[1])

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters."""
        return nnx.to_pure_dict(self._abstract)

    def abstract_frozen(self, mesh: Mesh, rules: ShardingRules) -> Params | None:
        """ShapeDtypeStructs with shardings of the weights that are not trained, where there are any."""
        return None

    def param_shardings(self, mesh: Mesh, rules: ShardingRules) -> Params:
        """A NamedSharding for each parameter, from its logical axes."""
        shardings = jax.tree.map(
            lambda p: rules.sharding(mesh, p.shape, p.get_metadata()["logical_axes"]),
            self._abstract,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        return nnx.to_pure_dict(shardings)

    def parameter_count(self) -> int:
        """Parameters in all."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params()))


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, rules: ShardingRules
) -> TrainState:
    """The train state as ShapeDtypeStructs with shardings: to compile for, and to restore into."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    param_shardings = model.param_shardings(mesh, rules)
    shapes = jax.eval_shape(lambda: _fresh_state(model, optimizer, jax.random.key(0)))
    optimizer_shardings = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes.optimizer,
        param_shardings,
        transform_non_params=lambda _: replicated,
    )
    shardings = TrainState(replicated, param_shardings, optimizer_shardings)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    rules: ShardingRules,
    params: Params | None = None,
) -> TrainState:
    """A fresh train state, each array made on the devices that hold it.

    ``params`` are donated where they are given; else the seed decides them.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh, rules))
    if params is not None:
        begin = partial(_first_state, optimizer)
        return jax.jit(begin, out_shardings=shardings, donate_argnums=0)(params)
    init = partial(_fresh_state, model, optimizer)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))


def _fresh_state(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    return _first_state(optimizer, model.init_params(key))


def _first_state(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
    model: Model, loss: Loss, optimizer: optax.GradientTransformation, accumulation: int = 1
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """The function (state, batch, frozen=None) -> (state, metrics) to jit, with the state donated.

    Metrics are float32 scalars: ``loss`` (its mean over the batch's weight) and ``gradient_norm``
    (before clipping).

    Args:
      model: what is trained.
      loss: one of ``training.losses``.
      optimizer: of ``make_optimizer``.
      accumulation: parts that a batch is worked through in.
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
            (mean, gradients), _ = jax.lax.scan(add_part, nothing, _parts(batch, accumulation))
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        metrics = {"loss": mean, "gradient_norm": optax.tree.norm(gradients)}
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return train_step


def _parts(batch: Any, count: int) -> Any:
    """[B, ...] -> [count, B / count, ...], rows dealt out in turn so that none changes its device."""
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
