"""The layers of a transformer as programs of one layer each, of which all layers of a kind share one.

The time to compile a program of all layers grows with their number. On a CPU, those of one answer by a model
of 30 layers took 60 s of processor time, and these 8 s. A call costs little beside the work of a layer there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from agentic_ring.attention.cache import KVCache, cache_specs
from agentic_ring.attention.cache.kv_cache import CacheDtype
from agentic_ring.extras import needs_extra
from agentic_ring.models.transformer import Transformer

with needs_extra("models"):
    from flax import nnx

Method = Literal["prefill_chunk", "store_chunk", "extend"]
"""Methods of a ``Transformer`` that encode tokens and store them in a cache."""


@dataclass(frozen=True)
class LayerPrograms:
    """Calls the methods of a transformer with a list of blocks, layer by layer. Caches are donated."""

    transformer: Transformer
    mesh: Mesh
    cache_dtype: CacheDtype | None
    """Storage dtype of keys and values; None uses the transformer's dtype."""

    def __call__(
        self, method: Method, x: jax.Array, positions: Any, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Returns the encoded tokens and the cache; "store_chunk" leaves the last layer's input as it is."""
        x, positions = jax.device_put(x, self._encoded(method)), jnp.asarray(positions)
        keys, values, slots = [], [], (cache.positions, cache.filled, cache.calls)
        stored = cache
        for index, (kind, weights) in enumerate(self._layers):
            last = method == "store_chunk" and index + 1 == len(self._layers)
            chosen = "prefill_chunk" if method == "store_chunk" and not last else method
            before = None if prefix is None else prefix.only(index)
            layer = weights, x, positions, cache.keys[index], cache.values[index], slots, before
            found = self._program(chosen, kind)(*layer)
            x, stored = (x, found) if last else found
            keys += stored.keys
            values += stored.values
        return x, replace(stored, keys=tuple(keys), values=tuple(values))

    @property
    def weights(self) -> list[list[jax.Array]]:
        """Those of each layer."""
        return [weights for _, weights in self._layers]

    def temporary_bytes(self, x: jax.ShapeDtypeStruct, cache: KVCache) -> int:
        """Bytes on each device while a layer encodes a chunk like x [B, C, D]; ``cache`` has only shapes."""
        # What is compiled here is what such a call runs, as all arrays are placed as there.
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._encoded("prefill_chunk"))
        positions, found = jnp.zeros(x.shape[:2], jnp.int32), []
        for kind, index in {kind: index for index, (kind, _) in enumerate(self._layers)}.items():
            slots = cache.positions, cache.filled, cache.calls
            layer = self._layers[index][1], x, positions, cache.keys[index], cache.values[index], slots, None
            memory = self._program("prefill_chunk", kind).lower(*layer).compile().memory_analysis()
            found.append(int(memory.temp_size_in_bytes + memory.output_size_in_bytes))
        return max(found)

    @cached_property
    def _layers(self) -> list[tuple[int, list[jax.Array]]]:
        """Kind and weights of each layer."""
        return [(self._kinds.index(each), weights) for each, weights in self._singles]

    @cached_property
    def _kinds(self) -> list[Any]:
        """The structures that layers have."""
        return list(dict.fromkeys(structure for structure, _ in self._singles))

    @cached_property
    def _singles(self) -> list[tuple[Any, list[jax.Array]]]:
        """Structure and weights of each layer, as a transformer of this layer only."""
        blocks: Any = self.transformer.blocks
        singles = []
        for index in range(self.transformer.config.layers):
            single = jax.tree.map(lambda x: x, self.transformer)
            single.blocks, single.norm = nnx.List([blocks[index]]), None
            single.config = replace(self.transformer.config.of_layer(index), layers=1)
            structure, state = nnx.split(single)
            weights, tree = jax.tree.flatten(state)
            singles.append(((structure, tree), weights))
        return singles

    @cached_property
    def _program(self) -> Callable[[Method, int], Any]:
        """(method, kind of a layer) -> its compiled function."""

        @cache
        def compiled(method: Method, kind: int) -> Any:
            structure, tree = self._kinds[kind]

            def extend(weights, x, positions, keys, values, slots, prefix):
                transformer = nnx.merge(structure, jax.tree.unflatten(tree, weights))
                given = () if prefix is None else (prefix,)
                return getattr(transformer, method)(x, positions, KVCache((keys,), (values,), *slots), *given)

            config = self.transformer.config
            rules = config.rules.of_keys(config.key_value_heads)
            specs = cache_specs(rules, self.cache_dtype or config.dtype, layers=1)
            stored = jax.tree.map(partial(NamedSharding, self.mesh), specs)
            shardings = stored if method == "store_chunk" else (self._encoded(method), stored)
            return jax.jit(extend, donate_argnames=("keys", "values"), out_shardings=shardings)

        return compiled

    def _encoded(self, method: Method) -> NamedSharding:
        """Sharding of encoded tokens [B, C, D]."""
        tokens = None if method == "extend" else "sequence"
        return NamedSharding(self.mesh, self.transformer.config.rules.spec("batch", tokens, None))
