"""LoRA (arXiv 2106.09685): small trained matrices beside weights that stay as they are."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from agentic_ring.errors import ConfigError
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.low_rank import LowRankWeight
from agentic_ring.models.model import Config, Model, Params

Path = tuple[Any, ...]
"""Names of the modules and of the parameter."""


@dataclass(frozen=True)
class LoraConfig:
    """What is trained beside the frozen weights."""

    rank: int
    """Inner dimension R of A B."""
    scale: float = 2.0
    """Of A B; "alpha / rank" elsewhere."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.scale <= 0:
            raise ConfigError(f"LoRA of rank {self.rank} and scale {self.scale}; both must be positive")


@dataclass(frozen=True)
class _Adapted:
    """A stacked matrix that gets an A and a B.

    Attributes:
      shape: [layers, inputs, outputs].
      axes: logical axes of inputs and outputs.
      inputs: how many of them are inputs.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: int

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Of A [layers, inputs, R] and B [layers, R, outputs]."""
        layers, sizes = self.shape[0], self.shape[1:]
        return {"a": (layers, *sizes[: self.inputs], rank), "b": (layers, rank, *sizes[self.inputs :])}

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Of A and B without the layers: each lies as the weight's own dimensions lie."""
        return {"a": (*self.axes[: self.inputs], None), "b": (None, *self.axes[self.inputs :])}


class LoraModel(Model[Config]):
    """A model of which only an A and a B for each matrix of its blocks are trained.

    All projections of attention and feedforward are adapted; embeddings, head and norms stay. A is
    random and B zero, so that training starts from the frozen weights' own outputs. Rematerialise the
    layers (any ``TransformerConfig.remat`` but "none"), or the sums of all layers are kept for the backward.

    Args:
      config: of the module.
      lora: rank and scale.
      dtype: that the frozen weights are stored in.
    """

    def __init__(self, config: Config, lora: LoraConfig, dtype: Literal["float32", "bfloat16"]):
        super().__init__(config)
        self.lora = lora
        self._dtype = dtype
        self._adapted: dict[Path, _Adapted] = {}
        for path, parameter in nnx.to_flat_state(self._abstract):
            shape, axes = parameter.shape, parameter.get_metadata()["logical_axes"]
            if len(shape) > len(axes) >= 2:
                # A projection reads the model's width, or writes it.
                self._adapted[path] = _Adapted(shape, axes, 1 if axes[0] == "embed" else len(axes) - 1)

    def bind(self, params: Params, frozen: Params | None = None) -> Any:
        """The module with the frozen weights, each adapted one with its A B added when it is read."""
        if frozen is None:
            raise TypeError("a model with LoRA needs its frozen weights")
        weights = flatten_dict(frozen) | dict(self._sums(params, frozen))
        return nnx.merge(self.graphdef, unflatten_dict(weights))

    def _sums(self, params: Params, frozen: Params) -> list[tuple[Path, LowRankWeight]]:
        base: dict[Path, Any] = flatten_dict(frozen)
        trained: dict[Path, Any] = flatten_dict(params)
        return [
            (path, LowRankWeight(base[path], trained[*path, "a"], trained[*path, "b"], self.lora.scale))
            for path in self._adapted
        ]

    def merged(self, params: Params, frozen: Params) -> Params:
        """The weights of a plain model with the same outputs, in the dtype of the frozen ones.

        One weight is made after the other, layer by layer; those that are not adapted are shared.
        """

        def merge(weight: LowRankWeight) -> jax.Array:
            return jax.lax.map(lambda layer: layer[...].astype(weight.base.dtype), weight)

        weights = flatten_dict(frozen)
        for path, weight in self._sums(params, frozen):
            weights[path] = jax.jit(merge, out_shardings=weight.base.sharding)(weight)
        return unflatten_dict(weights)

    def init_params(self, key: jax.Array) -> Params:
        """A fresh A with variance 1 / inputs, and B = 0, for each adapted weight."""
        params = {}
        keys = jax.random.split(key, len(self._adapted))
        for own_key, (path, adapted) in zip(keys, self._adapted.items(), strict=True):
            shapes = adapted.shapes(self.lora.rank)
            fan_in = jnp.prod(jnp.array(shapes["a"][1:-1]))
            params[*path, "a"] = jax.random.normal(own_key, shapes["a"]) / jnp.sqrt(fan_in)
            params[*path, "b"] = jnp.zeros(shapes["b"])
        return unflatten_dict(params)

    def abstract_params(self) -> Params:
        """Shapes and dtypes of all A and B."""
        return jax.eval_shape(self.init_params, jax.random.key(0))

    def abstract_frozen(self, mesh: Mesh, rules: ShardingRules) -> Params:
        """ShapeDtypeStructs with shardings of the frozen weights."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, jnp.dtype(self._dtype), sharding=sharding
            ),
            super().abstract_params(),
            super().param_shardings(mesh, rules),
        )

    def param_shardings(self, mesh: Mesh, rules: ShardingRules) -> Params:
        """A NamedSharding for each A and B."""
        shardings = {}
        for path, adapted in self._adapted.items():
            shapes = adapted.shapes(self.lora.rank)
            for name, axes in adapted.logical_axes().items():
                shardings[*path, name] = rules.sharding(mesh, shapes[name], axes)
        return unflatten_dict(shardings)
