"""The programs that a LLaMA reads and writes with, and the caches they fill. Call them under the mesh."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from agentic_ring.attention.cache import KVCache, cache_specs, empty_cache, slots_needed, specs_of
from agentic_ring.attention.cache import first_row as one_row
from agentic_ring.attention.cache.storage import CacheDtype
from agentic_ring.errors import ArgumentError
from agentic_ring.inference.sampling import SamplingValues, choose
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.layer_by_layer import layer_by_layer, suits
from agentic_ring.models.llama import Llama

SCORED_AT_A_TIME = 64
"""Tokens of a row whose logits over the whole vocabulary are alive at a time while prompts are scored."""


@dataclass(frozen=True)
class Programs:
    """Of one model on one mesh; each is compiled once for every size of its arrays.

    Attributes:
      model: its weights wherever they are.
      mesh: to run on.
      chunk: tokens of a text that are encoded at a time.
      cache_dtype: how keys and values are kept; the model's dtype where absent.
    """

    model: Llama
    mesh: Mesh
    chunk: int
    cache_dtype: CacheDtype | None

    @property
    def weights(self) -> Any:
        """What the programs take as their first argument."""
        return self._parts[1]

    def _bind(self, weights: Any) -> Llama:
        return nnx.merge(self._parts[0], weights)

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        """The model as these devices run it best: its structure, and its weights."""
        return nnx.split(layer_by_layer(self.model) if suits(self.mesh) else self.model)

    @property
    def rules(self) -> ShardingRules:
        """Which mesh axes carry what."""
        return self.model.config.transformer.rules

    def empty(self, rows: int, slots: int, new_tokens: int = 0) -> KVCache:
        """A cache for texts of ``slots`` tokens, padding included, and as many new ones, one at a time."""
        return self._empty(rows, slots, new_tokens)

    @cached_property
    def _empty(self) -> Any:
        return jax.jit(self._fresh, static_argnums=(0, 1, 2), out_shardings=self._shardings(self.rules))

    def nothing_read(self, rows: int) -> jax.Array:
        """What ``encode`` takes as each row's last token before the first call: zeros [B, D]."""
        stack = self.model.config.transformer
        # Placed as ``encode`` returns it: else its first call would be a program of its own.
        return jnp.zeros((rows, stack.width), stack.dtype, device=self._per_row)

    @cached_property
    def encode(self) -> Any:
        """(weights, tokens, positions [B, C], place_of_last [B], last, cache, prefix) -> two results.

        Encodes a piece and stores it: ``last`` [B, D], each row's last token encoded once it was met, and
        the cache.
        """

        def encode(
            weights: Any,
            tokens: jax.Array,
            positions: jax.Array,
            place_of_last: jax.Array,
            last: jax.Array,
            cache: KVCache,
            prefix: KVCache | None,
        ) -> tuple[jax.Array, KVCache]:
            encoded, cache = self._bind(weights).prefill_chunk(tokens, positions, cache, prefix)
            size = tokens.shape[1]
            place = jnp.clip(place_of_last, 0, size - 1)[:, None, None]
            here = (place_of_last >= 0) & (place_of_last < size)
            found = jnp.take_along_axis(encoded, place, axis=1)[:, 0]
            return jnp.where(here[:, None], found, last), cache

        return self._jit(encode, "cache", self._per_row)

    @cached_property
    def first_row(self) -> Any:
        """(weights, cache, last [B, D]) -> (logits [1, V], cache of batch 1): of the first row."""

        def first_row(weights: Any, cache: KVCache, last: jax.Array) -> tuple[jax.Array, KVCache]:
            return self._bind(weights).logits(last[:1]), one_row(cache)

        return self._jit(first_row, "cache", None, rules=replace(self.rules, batch=()))

    @cached_property
    def first_token(self) -> Any:
        """(weights, last [B, D], sampling, rows [B]) -> (tokens [B], their log probabilities [B])."""

        def first_token(
            weights: Any, last: jax.Array, sampling: SamplingValues, rows: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            return choose(self._bind(weights).logits(last), sampling, rows, jnp.int32(0))

        return jax.jit(first_token)

    @cached_property
    def next_token(self) -> Any:
        """(weights, tokens [B], positions [B], cache, prefix, sampling, rows [B], index) -> three results.

        One step: the tokens after the given ones, their log probabilities, and the cache. ``index`` is the
        number in its answer of the token that is chosen.
        """

        def next_token(
            weights: Any,
            tokens: jax.Array,
            positions: jax.Array,
            cache: KVCache,
            prefix: KVCache | None,
            sampling: SamplingValues,
            rows: jax.Array,
            index: jax.Array,
        ) -> tuple[jax.Array, jax.Array, KVCache]:
            model = self._bind(weights)
            encoded, cache = model.extend(tokens[:, None], positions[:, None], cache, prefix)
            return *choose(model.logits(encoded[:, 0]), sampling, rows, index), cache

        return self._jit(next_token, "cache", None, None)

    @cached_property
    def score(self) -> Any:
        """(weights, tokens [B, C], positions, targets, cache, prefix) -> four results.

        Log probabilities of the targets [B, C], the likeliest tokens in their places [B, C] with their own
        log probabilities [B, C], and the cache.
        """

        def score(
            weights: Any,
            tokens: jax.Array,
            positions: jax.Array,
            targets: jax.Array,
            cache: KVCache,
            prefix: KVCache | None,
        ) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
            model = self._bind(weights)
            encoded, cache = model.prefill_chunk(tokens, positions, cache, prefix)

            def of_some(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
                x, target = part
                values = jax.nn.log_softmax(model.logits(x))
                found = jnp.take_along_axis(values, target[..., None], axis=-1)[..., 0]
                # Both out of one array: the likeliest token's value is bit for bit the same in both.
                return found, jnp.argmax(values, axis=-1).astype(jnp.int32), values.max(axis=-1)

            batch, length = tokens.shape
            padding = -length % SCORED_AT_A_TIME

            def split(x: jax.Array) -> jax.Array:
                x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
                return x.reshape(batch, -1, SCORED_AT_A_TIME, *x.shape[2:]).swapaxes(0, 1)

            parts = jax.lax.map(of_some, (split(encoded), split(targets)))
            found, likeliest, most = (x.swapaxes(0, 1).reshape(batch, -1)[:, :length] for x in parts)
            return found, likeliest, most, cache

        return self._jit(score, "cache", None, None, None)

    def cache_bytes(self, rows: int, slots: int) -> int:
        """Bytes of a cache on all devices together."""
        shapes = jax.eval_shape(partial(self._fresh, rows, slots, 0))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    def encode_bytes(self, rows: int, slots: int) -> int:
        """Temporary bytes that a device needs to encode a chunk into such a cache, as it is compiled."""
        shapes = jax.eval_shape(partial(self._fresh, rows, slots, 0))
        cache = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self._shardings(self.rules),
        )
        piece = jax.ShapeDtypeStruct((rows, self.chunk), jnp.int32)
        place = jax.ShapeDtypeStruct((rows,), jnp.int32)
        last = jax.eval_shape(partial(self.nothing_read, rows))
        compiled = self.encode.lower(self.weights, piece, piece, place, last, cache, None).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    def _fresh(self, rows: int, slots: int, new_tokens: int) -> KVCache:
        stack, ring = self.model.config.transformer, self.mesh.shape["ring"]
        capacity = slots_needed(slots, new_tokens, 1, ring, self.chunk)
        size = (stack.layers, rows, capacity, stack.key_value_heads, stack.head_dim)
        return empty_cache(*size, dtype=self.cache_dtype or stack.dtype, ring=ring)

    def _shardings(self, rules: ShardingRules) -> KVCache:
        stack = self.model.config.transformer
        specs = cache_specs(rules, self.cache_dtype or stack.dtype, stack.layers)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def place(self, cache: KVCache) -> KVCache:
        """A document's cache, filled on other devices, on these; only to be attended to.

        Raises:
          ArgumentError: it does not divide over the ring.
        """
        ring, slots = self.mesh.shape["ring"], cache.positions.shape[1]
        if slots % ring:
            raise ArgumentError(
                f"the document has {slots} slots, which do not divide over a ring of {ring}; read it in "
                f"chunks of a multiple of {ring} tokens"
            )
        full = replace(cache, filled=jnp.full(ring, slots // ring, jnp.int32))
        specs = specs_of(full, replace(self.rules, batch=()))
        return jax.device_put(full, jax.tree.map(partial(NamedSharding, self.mesh), specs))

    @property
    def _per_row(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.rules.spec("batch"))

    def _jit(
        self,
        function: Any,
        donate: str,
        *results: NamedSharding | None,
        rules: ShardingRules | None = None,
    ) -> Any:
        """Compiled when called. Its last result is a cache, after others with these shardings."""
        shardings = (*results, self._shardings(rules or self.rules))
        return jax.jit(function, donate_argnames=donate, out_shardings=shardings)
