"""Compiled functions of a LLaMA for encoding, generating and scoring, and the batches that they take.

Call the functions under ``jax.set_mesh``. Batches are padded to few sizes, since each size is compiled once.
"""

from collections.abc import Iterator, Sequence
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
from agentic_ring.inference.cached_model import CachedModel, array_bytes, program
from agentic_ring.inference.sampling import sample_next_token

SCORED_AT_A_TIME = 64
"""Tokens per row whose logits over the vocabulary are in memory at a time during scoring."""


@dataclass(frozen=True)
class LlamaPrograms(CachedModel):
    """Each function is compiled once for every size of its arrays; ``prefix`` is a ``KVCache`` or None.

    ``chunk`` tokens of a text are encoded at a time.
    """

    chunk: int

    def empty(self, rows: int, slots: int, new_tokens: int = 0) -> KVCache:
        """A cache for texts of ``slots`` tokens, padding included, and ``new_tokens`` generated ones."""
        return self.placed_cache(rows, slots_needed(slots, new_tokens, 1, self.ring, self.chunk))

    def nothing_read(self, rows: int) -> jax.Array:
        """Argument ``last`` of the first call of ``encode``: zeros [B, D]."""
        # Placed as ``encode`` returns it; otherwise its first call would be compiled separately.
        per_row = NamedSharding(self.mesh, self.rules.spec("batch"))
        return jnp.zeros((rows, self.stack.width), self.stack.dtype, device=per_row)

    @program(("batch",))
    def encode(self, weights, tokens, positions, place_of_last, last, cache, prefix):
        """Encodes a chunk, [B, C], and stores it.

        ``last`` [B, D] is the encoded last token, at ``place_of_last`` [B], of each row that has ended.
        """
        model = self.bind(weights)
        encoded, cache = model.transformer.prefill_chunk(model.embedded(tokens), positions, cache, prefix)
        size = tokens.shape[1]
        place = jnp.clip(place_of_last, 0, size - 1)[:, None, None]
        here = (place_of_last >= 0) & (place_of_last < size)
        found = jnp.take_along_axis(encoded, place, axis=1)[:, 0]
        return jnp.where(here[:, None], found, last), cache

    @program()
    def store(self, weights, tokens, positions, cache):
        """Stores a chunk that is not the last one of its text; the last layer's attention is not computed."""
        model = self.bind(weights)
        return model.transformer.store_chunk(model.embedded(tokens), positions, cache)

    @program(None, whole_rows=False)
    def first_row(self, weights, cache, last):
        """Returns the logits [1, V] and the cache, of batch 1, of the first row."""
        return self.bind(weights).logits(last[:1]), one_row(cache)

    @cached_property
    def first_token(self) -> Any:
        """(weights, last [B, D], sampling, rows [B]) -> (tokens [B], their log probabilities [B])."""

        def first_token(weights, last, sampling, rows):
            return sample_next_token(self.bind(weights).logits(last), sampling, rows, jnp.int32(0))

        return jax.jit(first_token)

    @program(None, None)
    def next_token(self, weights, tokens, positions, cache, prefix, sampling, rows, index):
        """Decodes token ``index`` of each answer, [B]: returns it, its log probability, and the cache."""
        model = self.bind(weights)
        x = model.embedded(tokens[:, None])
        encoded, cache = model.transformer.extend(x, positions[:, None], cache, prefix)
        return *sample_next_token(model.logits(encoded[:, 0]), sampling, rows, index), cache

    @program(None, None, None)
    def score(self, weights, tokens, positions, targets, cache, prefix):
        """Encodes a chunk; returns log probabilities of targets, likeliest tokens with theirs, the cache."""
        model = self.bind(weights)
        encoded, cache = model.transformer.prefill_chunk(model.embedded(tokens), positions, cache, prefix)

        def score_part(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            x, target = part
            values = jax.nn.log_softmax(model.logits(x))
            found = jnp.take_along_axis(values, target[..., None], axis=-1)[..., 0]
            # Both come from one array, so the most likely token has bit for bit the same value in both.
            return found, jnp.argmax(values, axis=-1).astype(jnp.int32), values.max(axis=-1)

        batch, length = tokens.shape
        padding = -length % SCORED_AT_A_TIME

        def split(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
            return x.reshape(batch, -1, SCORED_AT_A_TIME, *x.shape[2:]).swapaxes(0, 1)

        parts = jax.lax.map(score_part, (split(encoded), split(targets)))
        return *(x.swapaxes(0, 1).reshape(batch, -1)[:, :length] for x in parts), cache

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
        place = jax.ShapeDtypeStruct((rows,), jnp.int32)
        last = jax.eval_shape(partial(self.nothing_read, rows))
        compiled = self.encode.lower(self.weights, tokens, tokens, place, last, cache, None).compile()
        temporary = int(compiled.memory_analysis().temp_size_in_bytes)  # of each device
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
