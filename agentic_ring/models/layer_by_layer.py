"""Models whose layers are arrays of their own, for processors that would copy each layer out of a stack.

A decode step reads every weight once and computes little. XLA's CPU compiler copies the slices of a stack
before it multiplies by them, at every step; arrays of their own it reads where they lie.
"""

from typing import Protocol, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.models.transformer import Transformer


class HasTransformer(Protocol):
    """A model round the stack."""

    transformer: Transformer


AnyModel = TypeVar("AnyModel", bound=HasTransformer)


def suits(mesh: Mesh) -> bool:
    """Whether ``layer_by_layer`` makes a model faster on these devices."""
    return mesh.devices.flat[0].platform == "cpu"


def layer_by_layer(model: AnyModel) -> AnyModel:
    """The same model with ``transformer.blocks`` a list: to be read and written with, not to be stored.

    On a CPU the layers lie in the memory of the stack, as long as ``model`` has it there; nothing is
    copied but vectors and what XLA could not read in place. Compile time grows with the layers.
    """
    own = jax.tree.map(lambda x: x, model)
    stack = model.transformer
    own.transformer.blocks = nnx.List(
        jax.tree.map(lambda x, index=index: _layer(x, index), stack.blocks)
        for index in range(stack.config.layers)
    )
    return own


def _layer(stacked: jax.Array, index: int) -> jax.Array:
    """One layer, on the devices that have it in ``stacked``."""
    if not stacked.committed:
        return jax.device_put(np.asarray(stacked)[index])
    sharding = stacked.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    parts = [
        jax.device_put(np.asarray(shard.data)[index], shard.device) for shard in stacked.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(stacked.shape[1:], sharding, parts)
