"""Compiled functions of a LLaMA for encoding, generating and scoring, and the batches that they take.

Call the functions under ``jax.set_mesh``. Batches are padded to few sizes, since each size is compiled once.
On a CPU the layers of a deep model are programs of their own (``layer_programs``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from agentic_ring.attention.cache import EMPTY_SLOT, KVCache, slots_needed, specs_of
from agentic_ring.attention.cache import first_row as one_row
from agentic_ring.errors import ArgumentError
from agentic_ring.extras import needs_extra
from agentic_ring.inference.cached_model import CachedModel, array_bytes, program, unstack_layers
from agentic_ring.inference.layer_programs import LayerPrograms, Method
from agentic_ring.inference.sampling import sample_next_token
from agentic_ring.mesh import mesh_platform

with needs_extra("models"):
    from flax import nnx

SHALLOW = 4
"""Layers up to which a program on a CPU has all of them, as elsewhere: it is compiled as fast as those of
single layers, and calls of these would take a third of the time that a small model needs for a token."""
SCORED_AT_A_TIME = 64
"""Tokens per row whose logits over the vocabulary are in memory at a time during scoring."""


def _whole(*results: tuple[str | None, ...] | None) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a method as ``program`` does, unless its parts and layers are compiled one by one."""

    def compiled(method: Callable[..., Any]) -> Any:
        whole = program(*results)(method).func
        return cached_property(lambda model: whole(model) if model.layers is None else method.__get__(model))

    return compiled


def _part(*axes: str | None) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a part of the methods above; where these have a program of their own, it becomes part of that.

    ``axes`` are the logical axes of its result; without any, the compiler chooses the sharding.
    """

    def compiled(method: Callable[..., Any]) -> Any:
        def compile_for(model: "LlamaPrograms") -> Any:
            sharding = NamedSharding(model.mesh, model.rules.spec(*axes)) if axes else None
            return jax.jit(method.__get__(model), out_shardings=sharding)

        return cached_property(compile_for)

    return compiled


@dataclass(frozen=True)
class LlamaPrograms(CachedModel):
    """Each function is compiled once for every size of its arrays; ``prefix`` is a ``KVCache`` or None.

    ``chunk`` tokens of a text are encoded at a time.
    """

    chunk: int

    @cached_property
    def layers(self) -> LayerPrograms | None:
        """The layers, where they are programs of their own."""
        if mesh_platform(self.mesh) != "cpu" or self.stack.layers <= SHALLOW:
            return None
        return LayerPrograms(unstack_layers(self.module).transformer, self.mesh, self.cache_dtype)

    @cached_property
    def _parts(self) -> tuple[Any, Any, list[jax.Array]]:
        if self.layers is None:
            return super()._parts
        others = jax.tree.map(lambda x: x, self.module)
        others.transformer.blocks = None
        structure, state = nnx.split(others)
        weights, tree = jax.tree.flatten(state)
        return structure, tree, weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return array_bytes((self.weights, self.layers and self.layers.weights))

    def empty(self, rows: int, slots: int, new_tokens: int = 0) -> KVCache:
        """A cache for texts of ``slots`` tokens, padding included, and ``new_tokens`` generated ones."""
        return self.placed_cache(rows, slots_needed(slots, new_tokens, 1, self.ring, self.chunk))

    def nothing_read(self, rows: int) -> jax.Array:
        """Argument ``last`` of the first call of ``encode``: zeros [B, 1, D]."""
        # Placed as ``encode`` returns it; otherwise its first call would be compiled separately.
        per_row = NamedSharding(self.mesh, self.rules.spec("batch", None, None))
        return jnp.zeros((rows, 1, self.stack.width), self.stack.dtype, device=per_row)

    @_whole(("batch", None, None))
    def encode(self, weights, tokens, positions, place_of_last, last, cache, prefix):
        """Encodes a chunk, [B, C], and stores it.

        ``last`` [B, 1, D] is the encoded last token, at ``place_of_last`` [B], of each row that has ended.
        """
        encoded, cache = self._through_layers("prefill_chunk", weights, tokens, positions, cache, prefix)
        return self._last_of(encoded, place_of_last, last), cache

    @_whole()
    def store(self, weights, tokens, positions, cache):
        """Stores a chunk that is not the last one of its text; the last layer's attention is not computed."""
        return self._through_layers("store_chunk", weights, tokens, positions, cache)[1]

    @program(None, whole_rows=False)
    def first_row(self, weights, cache, last):
        """Returns the logits [1, V] and the cache, of batch 1, of the first row."""
        return self.bind(weights).logits(last[:1, 0]), one_row(cache)

    @_whole(None, None)
    def next_token(self, weights, tokens, positions, cache, prefix, sampling, rows, index):
        """Decodes token ``index`` of each answer, [B]: returns it, its log probability, and the cache."""
        tokens, positions = self._columns(tokens, positions)
        encoded, cache = self._through_layers("extend", weights, tokens, positions, cache, prefix)
        return *self.sample(weights, encoded, sampling, rows, index), cache

    @_part()
    def sample(self, weights, encoded, sampling, rows, index):
        """Returns token ``index`` of each answer, [B], and its log probability, from [B, 1, D] before it."""
        return sample_next_token(self.bind(weights).logits(encoded[:, 0]), sampling, rows, index)

    @_whole(None, None, None)
    def score(self, weights, tokens, positions, targets, cache, prefix):
        """Encodes a chunk; returns log probabilities of targets, likeliest tokens with theirs, the cache."""
        encoded, cache = self._through_layers("prefill_chunk", weights, tokens, positions, cache, prefix)
        return *self._scored(weights, encoded, targets), cache

    def _through_layers(
        self,
        method: Method,
        weights: list[jax.Array],
        tokens: Any,
        positions: Any,
        cache: KVCache,
        *prefix: Any,
    ) -> tuple[jax.Array, KVCache]:
        """Embeds tokens [B, C], and calls a method of the transformer with them."""
        x = self._embedded(weights, tokens)
        if self.layers is not None:
            return self.layers(method, x, positions, cache, *prefix)
        found = getattr(self.bind(weights).transformer, method)(x, positions, cache, *prefix)
        return (x, found) if method == "store_chunk" else found

    @_part()
    def _columns(self, *rows):
        return [row[:, None] for row in rows]

    @_part()
    def _embedded(self, weights, tokens):
        return self.bind(weights).embedded(tokens)

    @_part("batch", None, None)
    def _last_of(self, encoded, place_of_last, last):
        size = encoded.shape[1]
        place = jnp.clip(place_of_last, 0, size - 1)[:, None, None]
        here = (place_of_last >= 0) & (place_of_last < size)
        return jnp.where(here[:, None, None], jnp.take_along_axis(encoded, place, axis=1), last)

    @_part()
    def _scored(self, weights, encoded, targets):
        model = self.bind(weights)

        def score_part(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            x, target = part
            values = jax.nn.log_softmax(model.logits(x))
            found = jnp.take_along_axis(values, target[..., None], axis=-1)[..., 0]
            # Both come from one array, so the most likely token has bit for bit the same value in both.
            return found, jnp.argmax(values, axis=-1).astype(jnp.int32), values.max(axis=-1)

        batch, length = targets.shape
        padding = -length % SCORED_AT_A_TIME

        def split(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
            return x.reshape(batch, -1, SCORED_AT_A_TIME, *x.shape[2:]).swapaxes(0, 1)

        parts = jax.lax.map(score_part, (split(encoded), split(targets)))
        return [x.swapaxes(0, 1).reshape(batch, -1)[:, :length] for x in parts]

    def encode_bytes(self, slots: int) -> tuple[int, int]:
        """Bytes over all devices of the cache of a document, and of temporary arrays while it is encoded."""
        rows, capacity = self.copies, slots_needed(slots, 0, 1, self.ring, self.chunk)
        shape = jax.eval_shape(partial(self.new_cache, rows, capacity))
        cache = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shape,
            self.cache_shardings(),
        )
        tokens = jax.ShapeDtypeStruct((rows, self.chunk), jnp.int32)
        if self.layers is not None:
            x = jax.eval_shape(self._embedded, self.weights, tokens)
            temporary = self.layers.temporary_bytes(x, cache)
        else:
            place = jax.ShapeDtypeStruct((rows,), jnp.int32)
            last = jax.eval_shape(partial(self.nothing_read, rows))
            compiled = self.encode.lower(self.weights, tokens, tokens, place, last, cache, None).compile()
            temporary = int(compiled.memory_analysis().temp_size_in_bytes)
        return array_bytes(shape), temporary * self.mesh.size

    def place(self, cache: KVCache) -> KVCache:
        """Copies a document's cache from other devices to these, for reading only.

        Raises:
          ArgumentError: its slots do not divide over the ring.
        """
        ring, slots = self.ring, cache.positions.shape[1]
        if slots % ring:
            raise ArgumentError(
                f"the document has {slots} slots, which do not divide over a ring of {ring}; read it in "
                f"chunks of a multiple of {ring} tokens"
            )
        full = replace(cache, filled=jnp.full(ring, slots // ring, jnp.int32))
        specs = specs_of(full, replace(self.rules, batch=()))
        return jax.device_put(full, jax.tree.map(partial(NamedSharding, self.mesh), specs))


Tokens = Sequence[int]


def bucket_size(length: int, unit: int, steps: int = 8) -> int:
    """Returns the smallest bucket size that holds ``length``.

    Sizes are multiples of ``unit``. From ``steps`` units on there are ``steps`` sizes between consecutive
    powers of two, so that a size exceeds its length by at most one unit or by 1 / ``steps``.
    """
    units = max(1, -(-length // unit))
    step = max(1, 2 ** (units - 1).bit_length() // (2 * steps))
    return unit * step * -(-units // step)


class BatchChunk(NamedTuple):
    """The same C columns of all rows."""

    tokens: np.ndarray
    """int32 [B, C]."""
    targets: np.ndarray
    """int32 [B, C], the token after each; 0 after the last token of a row."""
    positions: np.ndarray
    """int32 [B, C]; ``EMPTY_SLOT`` for padding."""
    place_of_last: np.ndarray
    """int32 [B], column of each row's last token in this chunk; out of range if elsewhere."""


@dataclass(frozen=True)
class RaggedBatch:
    """Rows of tokens, divided into chunks of columns."""

    rows: Sequence[Tokens]
    """Token sequences; some may be empty."""
    start: int
    """Position of the first token of every row."""
    chunk: int
    """Columns per chunk."""
    unit: int
    """The size of the last chunk is a multiple of this."""

    @cached_property
    def lengths(self) -> np.ndarray:
        """Length of each row, int32 [B]."""
        return np.array([len(row) for row in self.rows], np.int32)

    @property
    def sizes(self) -> list[int]:
        """Columns of each chunk: full chunks, then the rest rounded up to a bucket."""
        whole, rest = divmod(int(self.lengths.max()), self.chunk)
        last = [min(bucket_size(rest, self.unit, steps=2), self.chunk)] if rest else []
        return [self.chunk] * whole + last

    def chunks(self) -> Iterator[BatchChunk]:
        """All chunks in order."""
        first = 0
        for size in self.sizes:
            shape = len(self.rows), size
            tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            positions = np.full(shape, EMPTY_SLOT, np.int32)
            for number, row in enumerate(self.rows):
                part, after = row[first : first + size], row[first + 1 : first + 1 + size]
                tokens[number, : len(part)] = part
                targets[number, : len(after)] = after
                positions[number, : len(part)] = self.start + first + np.arange(len(part))
            yield BatchChunk(tokens, targets, positions, self.lengths - 1 - first)
            first += size
