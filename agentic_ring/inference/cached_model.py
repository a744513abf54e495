"""A model prepared for inference on a mesh: its weights, its key/value caches and their shardings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.attention.cache import KVCache, cache_specs, empty_cache
from agentic_ring.attention.cache.kv_cache import CacheDtype
from agentic_ring.extras import needs_extra
from agentic_ring.mesh import ShardingRules, batch_shards, check_divides, devices_along
from agentic_ring.models.transformer_config import TransformerConfig

with needs_extra("models"):
    from flax import nnx


def program(
    *results: tuple[str | None, ...] | None, whole_rows: bool = True
) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a method of a ``CachedModel`` once for every size of its arrays.

    Its ``cache`` is donated, and returned last, after results with these logical axes; with None the compiler
    chooses the sharding. Without ``whole_rows`` the returned cache has fewer rows than groups of devices.
    """

    def compiled(method: Callable[..., Any]) -> Any:
        def compile_for(model: "CachedModel") -> Any:
            rules = model.rules if whole_rows else replace(model.rules, batch=())
            axes = (
                axes if axes is None else NamedSharding(model.mesh, rules.spec(*axes)) for axes in results
            )
            cache = model.cache_shardings(rules)
            shardings = (*axes, cache) if results else cache
            return jax.jit(method.__get__(model), donate_argnames="cache", out_shardings=shardings)

        return cached_property(compile_for)

    return compiled


@dataclass(frozen=True)
class CachedModel:
    """Weights and caches of one model on one mesh; subclasses add the compiled functions.

    Raises:
      MeshError: heads do not divide over the mesh.
    """

    module: Any
    """An ``nnx`` module with a ``transformer``; its weights may lie on any devices."""
    mesh: Mesh
    """Devices to run on."""
    cache_dtype: CacheDtype | None
    """Storage dtype of keys and values; None uses the model's dtype."""

    def __post_init__(self) -> None:
        stack = self.stack
        for what, heads, rules in (
            ("number of heads", stack.heads, stack.rules),
            ("number of key heads", stack.key_value_heads, stack.rules.of_keys(stack.key_value_heads)),
        ):
            check_divides(what, heads, devices_along(self.mesh, rules.heads), rules.heads)

    @cached_property
    def _parts(self) -> tuple[Any, Any, list[jax.Array]]:
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        structure, state = nnx.split(unstack_layers(self.module) if on_cpu else self.module)
        # Only the leaves are passed: flattening the state of nnx takes a third of the time of a call.
        weights, tree = jax.tree.flatten(state)
        return structure, tree, weights

    @property
    def weights(self) -> list[jax.Array]:
        """First argument of every compiled function."""
        return self._parts[2]

    def bind(self, weights: list[jax.Array]) -> Any:
        """Returns the module with these weights."""
        structure, tree, _ = self._parts
        return nnx.merge(structure, jax.tree.unflatten(tree, weights))

    @property
    def stack(self) -> TransformerConfig:
        """Configuration of the transformer."""
        return self.module.config.transformer

    @property
    def rules(self) -> ShardingRules:
        """Mesh axes of each logical axis."""
        return self.stack.rules

    @property
    def ring(self) -> int:
        """Devices that share a sequence."""
        return devices_along(self.mesh, self.rules.sequence)

    @property
    def copies(self) -> int:
        """Groups of devices over which the rows of a batch are divided."""
        return batch_shards(self.mesh, self.rules)

    def new_cache(self, rows: int, slots: int) -> KVCache:
        """An empty cache for ``rows`` sequences, not yet placed on the mesh."""
        return new_cache(self.stack, rows, slots, self.ring, self.cache_dtype)

    @cached_property
    def placed_cache(self) -> Any:
        """Compiled function (rows, slots) -> an empty cache on the mesh."""
        return jax.jit(self.new_cache, static_argnums=(0, 1), out_shardings=self.cache_shardings())

    def cache_shardings(self, rules: ShardingRules | None = None) -> KVCache:
        """A NamedSharding for each array of a cache."""
        rules = (rules or self.rules).of_keys(self.stack.key_value_heads)
        specs = cache_specs(rules, self.cache_dtype or self.stack.dtype, self.stack.layers)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


def new_cache(
    stack: TransformerConfig, rows: int, slots: int, ring: int, dtype: CacheDtype | None
) -> KVCache:
    """An empty cache for the stack's layers and heads; ``dtype`` None is the stack's own."""
    size = (stack.layers, rows, slots, stack.key_value_heads, stack.head_dim)
    return empty_cache(*size, dtype=dtype or stack.dtype, ring=ring)


def array_bytes(tree: Any) -> int:
    """Bytes of all arrays, or of their shapes, in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def unstack_layers(model: Any) -> Any:
    """Returns the same model with ``transformer.blocks`` as a list of blocks, for decoding on CPUs.

    A decode step reads every weight once and computes little. XLA's CPU compiler copies each slice of a
    stacked weight before multiplying by it, at every step; separate arrays are read in place. On a CPU the
    layers share the memory of the stack as long as ``model`` keeps it; only vectors, and what XLA could
    not read in place, are copied. Compile time grows with the number of layers.
    """
    unstacked = jax.tree.map(lambda x: x, model)
    stack = model.transformer
    unstacked.transformer.blocks = nnx.List(
        jax.tree.map(partial(_layer, index=index), stack.blocks) for index in range(stack.config.layers)
    )
    return unstacked


def _layer(stacked: jax.Array, index: int) -> jax.Array:
    """One layer of a stacked array, on the devices that hold it."""
    if not stacked.committed:
        return jax.device_put(np.asarray(stacked)[index])
    sharding = stacked.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    parts = [
        jax.device_put(np.asarray(shard.data)[index], shard.device) for shard in stacked.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(stacked.shape[1:], sharding, parts)
