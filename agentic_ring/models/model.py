"""A model's structure apart from its parameters."""

from typing import Any, Generic, Protocol, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh

from agentic_ring.mesh import ShardingRules

Params = dict[str, Any]
"""Arrays in nested dictionaries, by the names of modules and parameters."""


class ModelConfig(Protocol):
    """The configuration of a model."""

    def build(self, key: jax.Array) -> nnx.Module:
        """Returns the module with fresh parameters."""
        ...


Config = TypeVar("Config", bound=ModelConfig)


class Model(Generic[Config]):
    """The structure of a module without its parameters, and the sharding of each parameter."""

    def __init__(self, config: Config):
        self.config = config
        self.graphdef, self._abstract = nnx.split(jax.eval_shape(lambda: config.build(jax.random.key(0))))

    def bind(self, params: Params, frozen: Params | None = None) -> Any:
        """Returns the module with these parameters; ``frozen`` ones exist only where some are not trained."""
        return nnx.merge(self.graphdef, params)

    def init_params(self, key: jax.Array) -> Params:
        """Returns fresh parameters; call it under jit to create each one on the devices that hold it."""
        return nnx.to_pure_dict(nnx.split(self.config.build(key))[1])

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters."""
        return nnx.to_pure_dict(self._abstract)

    def abstract_frozen(self, mesh: Mesh, rules: ShardingRules) -> Params | None:
        """ShapeDtypeStructs with shardings of the weights that are not trained; None if all are trained."""
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
        """Total number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params()))
