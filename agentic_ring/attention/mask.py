"""Attention masks from positions and segment ids; no T x S array is stored.

Query ``t`` attends to key ``s``, with ``d = position[t] - position[s]``, iff all of

    d >= 0 where causal, and d < window where there is one (|d| < window where not causal);
        or position[s] < prefix
    segment[s] == segment[t]
    position[t] lies in no range of rows that key s is hidden from
    neither token is padding, which is a negative position or a negative segment id

Positions, not places in the array, decide what is causal: a sequence permuted for load balance
keeps its meaning. Two packed documents, causal, the last slot padding:

    segment ids   0 0 1 1 -1        t=0   x . . . .
    positions     0 1 2 3  4        t=1   x x . . .
                                    t=2   . . x . .
                                    t=3   . . x x .
                                    t=4   . . . . .     nothing to attend to: output exactly 0
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentic_ring.errors import ArgumentError

PADDING = -1


@dataclass(frozen=True)
class MaskSpec:
    """The static part of a mask."""

    causal: bool = True
    """A query attends only to keys whose position is not after its own."""
    window: int | None = None
    """A query attends only to keys whose position differs from its own by less than this, so that 1 is the
    token itself."""
    prefix: int = 0
    """Keys at positions below this are attended by every query of their segment, whatever causal and window
    say: a prefix-LM, or the sink tokens that a sliding window keeps. For prefixes of different lengths, give
    the tokens of each row's prefix the same position."""

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ArgumentError(f"window is {self.window}; it must be at least 1, the token itself, or None")
        if self.prefix < 0:
            raise ArgumentError(f"prefix is {self.prefix}; it must be at least 0")

    @property
    def by_position(self) -> bool:
        """Whether the mask depends on positions."""
        return self.causal or self.window is not None

    def admits(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether queries at these positions attend to keys at those; the two broadcast."""
        admits = jnp.bool_(True)
        if self.causal:
            admits &= key <= query
        if self.window is not None:
            distance = query - key
            admits &= distance < self.window
            if not self.causal:
                admits &= distance > -self.window
        return admits | (key < self.prefix) if self.prefix else admits


class Bounds(NamedTuple):
    """Extremes of the labels of a chunk, padding left out; each [..., B], None without the label.

    Where a chunk is all padding, the lowest is the largest int32 and the highest is -1.
    """

    any_valid: jax.Array
    position_low: Any
    position_high: Any
    segment_low: Any
    segment_high: Any
    hidden: tuple[tuple[jax.Array, jax.Array], ...] = ()
    """Ranges [first, end) of rows that all keys of the chunk are hidden from."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLabels:
    """What a mask needs to know of each token, int32 [B, T] (or [1, T], shared by the batch).

    None stands for a label that the mask does not need: no array is made, permuted or compared.

    Attributes:
      positions, segment_ids: see the module.
      hidden: of keys, ranges of rows that they are hidden from: pairs of arrays, the first position of
        each key's range and the one after its last.
    """

    positions: Any = None
    segment_ids: Any = None
    hidden: tuple[tuple[jax.Array, jax.Array], ...] | None = None

    def pad(self, amount: int) -> "TokenLabels":
        """Adds ``amount`` padding tokens at the end."""
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, amount)), constant_values=PADDING), self)

    def bounds(self) -> Bounds:
        """Extremes over the last axis."""
        valid = _valid(self)

        def extremes(x: jax.Array | None) -> tuple[Any, Any]:
            if x is None:
                return None, None
            low = jnp.where(valid, x, jnp.iinfo(jnp.int32).max).min(-1)
            return low, jnp.where(valid, x, PADDING).max(-1)

        # The lowest end and the highest first position bound what is common to all ranges.
        hidden = tuple((extremes(first)[1], extremes(end)[0]) for first, end in self.hidden or ())
        return Bounds(valid.any(-1), *extremes(self.positions), *extremes(self.segment_ids), hidden)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HopMask:
    """The mask of one block of queries against one block of keys, as a kernel takes it.

    Attributes:
      query, key: labels of the queries [B, T] and of the keys [B, S]; both have positions, or neither, and
        likewise segment ids. Where keys are hidden from rows, they have positions.
      offset: where there are no positions, query t stands at position t + offset and key s at s.
      key_lengths: int32 [B], how many keys of each row are there, the others being padding at its end; None
        for all of them.
    """

    spec: MaskSpec = field(metadata={"static": True})
    query: TokenLabels
    key: TokenLabels
    offset: int = field(default=0, metadata={"static": True})
    key_lengths: jax.Array | None = None

    @property
    def trivial(self) -> bool:
        """Whether, statically, every query attends to every key."""
        labels = (self.query.positions, self.query.segment_ids, self.key_lengths)
        return not self.spec.by_position and all(label is None for label in labels)

    def placed(self, queries: int, keys: int) -> "HopMask":
        """The same mask of ``queries`` x ``keys`` tokens with all that it depends on in their labels."""
        mask = self.with_segments(queries, keys)
        if not self.spec.by_position or self.query.positions is not None:
            return mask
        query, key = (jnp.arange(length, dtype=jnp.int32)[None] for length in (queries, keys))
        # Positions below 0 would be padding.
        query, key = query + max(self.offset, 0), key + max(-self.offset, 0)
        return replace(mask, query=replace(mask.query, positions=query), key=replace(mask.key, positions=key))

    def with_segments(self, queries: int, keys: int) -> "HopMask":
        """The same mask, with the padding that ``key_lengths`` tell of in segment ids."""
        if self.key_lengths is None:
            return self
        query, key = self.query.segment_ids, self.key.segment_ids
        if query is None or key is None:
            query, key = (jnp.zeros((1, length), jnp.int32) for length in (queries, keys))
        key = jnp.where(jnp.arange(keys) < self.key_lengths[:, None], key, PADDING)
        labels = replace(self.query, segment_ids=query), replace(self.key, segment_ids=key)
        return HopMask(self.spec, *labels, self.offset)

    def allowed(self) -> jax.Array:
        """The mask as bool [B, T, S], or [1, T, S]; for one chunk pair, not for a whole sequence."""
        allowed = _valid(self.query)[..., :, None] & _valid(self.key)[..., None, :]
        if self.spec.by_position:
            query, key = self.query.positions, self.key.positions
            allowed &= self.spec.admits(query[..., :, None], key[..., None, :])
        if self.query.segment_ids is not None:
            allowed &= self.key.segment_ids[..., None, :] == self.query.segment_ids[..., :, None]
        for first, end in self.key.hidden or ():
            row = self.query.positions[..., :, None]
            allowed &= (row < first[..., None, :]) | (row >= end[..., None, :])
        return allowed

    def reachable(self, query: Bounds, key: Bounds) -> jax.Array:
        """Whether anything may attend between chunks of these bounds [..., B], which broadcast.

        A few comparisons a pair of chunks. False means that nothing attends; True may be said of a
        pair whose ranges overlap though no two labels in them meet.
        """
        reachable = query.any_valid & key.any_valid
        if self.spec.by_position:
            near = jnp.bool_(True)
            if self.spec.causal:
                near &= key.position_low <= query.position_high
            if self.spec.window is not None:
                near &= self.nearer(self.spec.window, query, key)
            reachable &= near | (key.position_low < self.spec.prefix)
        if query.segment_low is not None:
            reachable &= (key.segment_low <= query.segment_high) & (query.segment_low <= key.segment_high)
        for first, end in key.hidden:
            reachable &= (query.position_low < first) | (query.position_high >= end)
        return reachable

    def nearer(self, window: jax.Array | int, query: Bounds, key: Bounds) -> jax.Array:
        """Whether queries of a chunk may be nearer than ``window`` to keys of another; see ``reachable``."""
        near = query.position_low - key.position_high < window
        return near if self.spec.causal else near & (key.position_low - query.position_high < window)


def hidden_outside(first: jax.Array, end: jax.Array) -> jax.Array:
    """The ``hidden_rows`` of keys [..., 4] that are visible to the rows from ``first`` to before ``end``.

    With key s at position s, any of these takes O(T) numbers:

        mask                          causal    first[s]                 end[s]
        packed documents              yes       0                        end of the document
        packed documents,             no        start of the document    end of the document
          each a prefix-LM                        in its prefix, else s
        one question, many answers    yes       0                        T in the question,
                                                                           else end of the answer
        tree in depth-first order     yes       0                        end of the subtree
        window and global tokens      yes       0                        T for a global token,
                                                                           else s + window

    FlashMask (arXiv 2410.01359) describes masks by the ranges that are hidden, as ``attention`` takes them:
    here two, before ``first`` and from ``end`` on.
    """
    first, end = jnp.broadcast_arrays(jnp.asarray(first, jnp.int32), jnp.asarray(end, jnp.int32))
    last = jnp.full_like(end, jnp.iinfo(jnp.int32).max)
    return jnp.stack((jnp.zeros_like(first), first, end, last), axis=-1)


def _valid(labels: TokenLabels) -> jax.Array:
    valid = [x >= 0 for x in (labels.positions, labels.segment_ids) if x is not None]
    return valid[0] if len(valid) == 1 else valid[0] & valid[1]
