"""LoRA: only small updates of a model's matrices are trained; they can be merged into the weights."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from agentic_ring.errors import check_at_least_one, check_positive
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.low_rank import LowRankWeight
from agentic_ring.models.model import Config, Model, Params
from agentic_ring.models.transformer_config import Dtype


@dataclass(frozen=True)
class LoraConfig:
    """Rank and scale of the low-rank updates of LoRA (arXiv 2106.09685)."""

    rank: int
    """Inner dimension R of A B."""
    scale: float = 2.0
    """Factor of A B; elsewhere written "alpha / rank"."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "rank")
        check_positive(self, "scale")


_Path = tuple[Any, ...]  # names of the modules and of the parameter
# Shape of A [layers, inputs, R] or B [layers, R, outputs], and its logical axes without the layers.
_Matrix = tuple[tuple[int, ...], tuple[str | None, ...]]


class LoraModel(Model[Config]):
    """A model in which only an A and a B for each matrix of the blocks are trained.

    All projections of attention and feedforward are adapted; embeddings, head and norms stay frozen. A is
    random and B zero, so training starts from the outputs of the frozen weights. Rematerialise the layers
    (any ``TransformerConfig.remat`` except "none"); otherwise the backward pass keeps the sums of all layers.
    The frozen weights are stored in ``dtype``.
    """

    def __init__(self, config: Config, lora: LoraConfig, dtype: Dtype):
        super().__init__(config)
        self.lora = lora
        self._dtype = dtype
        self._adapters: dict[_Path, dict[str, _Matrix]] = {}
        for path, parameter in nnx.to_flat_state(self._abstract):
            shape, axes = parameter.shape, parameter.get_metadata()["logical_axes"]
            if len(shape) > len(axes) and "embed" in axes:
                layers, *sizes = shape
                # A projection maps from the model width or to it.
                inputs = 1 if axes[0] == "embed" else len(axes) - 1
                self._adapters[path] = {
                    "a": ((layers, *sizes[:inputs], lora.rank), (*axes[:inputs], None)),
                    "b": ((layers, lora.rank, *sizes[inputs:]), (None, *axes[inputs:])),
                }

    def bind(self, params: Params, frozen: Params | None = None) -> Any:
        """Returns the module with the frozen weights; A B is added to an adapted weight when it is read."""
        if frozen is None:
            raise TypeError("a model with LoRA needs its frozen weights")
        return nnx.merge(self.graphdef, unflatten_dict(flatten_dict(frozen) | self._sums(params, frozen)))

    def _sums(self, params: Params, frozen: Params) -> dict[_Path, LowRankWeight]:
        base: dict[_Path, Any] = flatten_dict(frozen)
        trained: dict[_Path, Any] = flatten_dict(params)
        return {
            path: LowRankWeight(base[path], trained[*path, "a"], trained[*path, "b"], self.lora.scale)
            for path in self._adapters
        }

    def merged(self, params: Params, frozen: Params) -> Params:
        """The weights of a plain model with the same outputs, in the dtype of the frozen weights.

        Weights are computed one by one and layer by layer; those that are not adapted are shared.
        """

        def merge(weight: LowRankWeight) -> jax.Array:
            return jax.lax.map(lambda layer: layer[...].astype(weight.base.dtype), weight)

        weights = flatten_dict(frozen)
        for path, weight in self._sums(params, frozen).items():
            weights[path] = jax.jit(merge, out_shardings=weight.base.sharding)(weight)
        return unflatten_dict(weights)

    def init_params(self, key: jax.Array) -> Params:
        """Returns a fresh A with variance 1 / inputs and B = 0 for each adapted weight."""
        params = {}
        keys = jax.random.split(key, len(self._adapters))
        for own_key, (path, matrices) in zip(keys, self._adapters.items(), strict=True):
            shape = matrices["a"][0]
            fan_in = jnp.prod(jnp.array(shape[1:-1]))
            params[*path, "a"] = jax.random.normal(own_key, shape) / jnp.sqrt(fan_in)
            params[*path, "b"] = jnp.zeros(matrices["b"][0])
        return unflatten_dict(params)

    def abstract_params(self) -> Params:
        """Shapes and dtypes of every A and B."""
        return jax.eval_shape(self.init_params, jax.random.key(0))

    def abstract_frozen(self, mesh: Mesh, rules: ShardingRules) -> Params:
        """ShapeDtypeStructs with shardings of the frozen weights."""
        dtype = jnp.dtype(self._dtype)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
            super().abstract_params(),
            super().param_shardings(mesh, rules),
        )

    def param_shardings(self, mesh: Mesh, rules: ShardingRules) -> Params:
        """A NamedSharding for every A and B."""
        shardings = {
            (*path, name): rules.sharding(mesh, *matrix)
            for path, matrices in self._adapters.items()
            for name, matrix in matrices.items()
        }
        return unflatten_dict(shardings)
