"""One hop of a ring: this device's queries against the block of keys that has just arrived.

Where the order of the sequence over the ring is known, most of a hop's mask is known with it, and
the kernel is given tiles without a mask. For a causal mask and the keys of another device:

    contiguous      its keys are all earlier, and every pair attends, or all later, and none does

    zigzag          keys    early late                keys    early late
                    early     x    .                  early     .    .
      queries       late      x    .        queries   late      x    x
                    that device stands earlier        that device stands later

In zigzag order late queries always attend to early keys; the second full quarter lies before or
after it. So each hop is two full tiles of half the block, on every device: the ring is in balance
and no device waits for another. Only a device's own block has a causal diagonal.

Everywhere else (explicit positions, striped order, a prefix, dropout) positions travel with the keys
and the kernel finds out chunk by chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentic_ring.attention.inputs import Expansion
from agentic_ring.attention.kernels.interface import Gradients, Kernel, Saved, Tile
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.options import Layout
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, empty_state, merge, state_dtype


class Block(NamedTuple):
    """Keys [B, S, K, H] and values [B, S, K, V] of one device in one array, so that one permute carries both.

    It is [2, B, S, K, H] where both have one size, which makes them parts of it in memory, else
    [1, B, S, K, H + V]. Gradients of both have the same form. With an expansion (``Queries``) it holds the
    latents [B, S, 1, R] and the rotated keys [B, S, 1, P] in their place.
    """

    keys_values: jax.Array
    labels: TokenLabels


def join_pair(k: jax.Array, v: jax.Array) -> jax.Array:
    """The ``keys_values`` of a block."""
    return jnp.stack((k, v)) if k.shape == v.shape else jnp.concatenate((k, v), axis=-1)[None]


def split_pair(keys_values: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of ``join_pair`` for keys of ``head_dim`` numbers."""
    if len(keys_values) == 2:
        return keys_values[0], keys_values[1]
    return keys_values[0, ..., :head_dim], keys_values[0, ..., head_dim:]


class Sums(NamedTuple):
    """What a device sums over the hops of a backward: the gradients, float32, of what stays on it."""

    dq: jax.Array
    d_expansion: Expansion | None = None


class Queries(NamedTuple):
    """What stays on a device.

    Attributes:
      q: its queries [B, T, N, H].
      labels: their labels.
      expansion: makes keys and values of a block that holds latents; else None.
    """

    q: jax.Array
    labels: TokenLabels
    expansion: Expansion | None = None

    def pair(self, block: Block) -> tuple[jax.Array, jax.Array]:
        """The keys [B, S, K, H] and values [B, S, K, V] of a block."""
        if self.expansion is None:
            return split_pair(block.keys_values, self.q.shape[3])
        return self.expansion(*split_pair(block.keys_values, self.expansion.key_weight.shape[0]))

    def gradients(self, block: Block, gradients: Gradients) -> tuple[Sums, jax.Array]:
        """What a tile of the block adds to the sums, and to the gradient of ``keys_values``."""
        pair = gradients.dk, gradients.dv
        if self.expansion is None:
            return Sums(gradients.dq, None), join_pair(*pair)
        size = self.expansion.key_weight.shape[0]

        def expand(expansion: Expansion, keys_values: jax.Array) -> tuple[jax.Array, jax.Array]:
            return expansion(*split_pair(keys_values, size))

        # In the dtype of the sums: over hops, and over devices in the end.
        primals = jax.tree.map(lambda x: x.astype(gradients.dk.dtype), (self.expansion, block.keys_values))
        d_expansion, d_block = jax.vjp(expand, *primals)[1](pair)
        return Sums(gradients.dq, d_expansion), d_block


class Origin(NamedTuple):
    """The device that a block of keys comes from.

    Attributes:
      here: this device's place in the ring.
      source: the place of the device whose block it is.
      distance: how many places before this device that is, where it is static; 0 is its own block.
    """

    here: jax.Array | int
    source: jax.Array | int
    distance: int | None = None

    @property
    def own(self) -> bool:
        """Whether, statically, this is the device's own block."""
        return self.distance == 0

    @property
    def earlier(self) -> jax.Array:
        """Whether the block's device stands earlier in the ring."""
        return jnp.asarray(self.source < self.here)


@dataclass(frozen=True)
class Hop:
    """The static part of a hop.

    Attributes:
      layout: the order of the sequence over the ring, where tiles follow from it; None where the
        labels carry positions instead, or where no token's place matters.
    """

    kernel: Kernel
    spec: MaskSpec
    layout: Layout | None

    def forward(self, queries: Queries, block: Block, origin: Origin, scores: Scores) -> SoftmaxState:
        """Attention of the queries to this block."""

        def whole(spec: MaskSpec, offset: int = 0) -> SoftmaxState:
            mask = HopMask(spec, queries.labels, block.labels, offset)
            return self.kernel.forward(Tile(queries.q, *queries.pair(block), mask, scores))

        if self.layout is None or origin.own:
            return whole(self.spec)
        if self.layout == "zigzag":
            quarters = _Quarters(queries, block, origin.earlier)
            return quarters.join_state(self.kernel.forward(quarters.tile(scores)))
        attends, spec, offset = self._contiguous(queries, origin)
        value_dim = jax.eval_shape(queries.pair, block)[1].shape[-1]
        return jax.lax.cond(attends, lambda: whole(spec, offset), lambda: empty_state(queries.q, value_dim))

    def backward(
        self, queries: Queries, saved: Saved, block: Block, origin: Origin, scores: Scores
    ) -> tuple[Sums, jax.Array]:
        """What the block adds to the sums, and the gradient of its ``keys_values`` from these queries."""

        def whole(spec: MaskSpec, offset: int = 0) -> tuple[Sums, jax.Array]:
            mask = HopMask(spec, queries.labels, block.labels, offset)
            tile = Tile(queries.q, *queries.pair(block), mask, scores)
            return queries.gradients(block, self.kernel.backward(tile, saved))

        if self.layout is None or origin.own:
            return whole(self.spec)
        if self.layout == "zigzag":
            quarters = _Quarters(queries, block, origin.earlier)
            gradients = self.kernel.backward(
                quarters.tile(scores), jax.tree.map(quarters.split_queries, saved)
            )
            sums, d_block = quarters.queries.gradients(quarters.keys, gradients)
            dq, d_block = quarters.join_gradients(sums.dq, d_block)
            return sums._replace(dq=dq), d_block
        attends, spec, offset = self._contiguous(queries, origin)

        def nothing() -> tuple[Sums, jax.Array]:
            summed = Sums(queries.q, queries.expansion), block.keys_values
            return jax.tree.map(lambda x: jnp.zeros_like(x, state_dtype(x.dtype)), summed)

        return jax.lax.cond(attends, lambda: whole(spec, offset), nothing)

    def _contiguous(self, queries: Queries, origin: Origin) -> tuple[jax.Array, MaskSpec, int]:
        """(whether the block is attended, its mask, its offset) for another device's whole block."""
        if self.spec.window is None:
            return origin.earlier, _EVERYTHING, 0
        assert origin.distance is not None, "the hops of a window are unrolled"
        # A block that came round the end of the sequence is no neighbour.
        attends = jnp.asarray(origin.source == origin.here - origin.distance)
        return attends, self.spec, origin.distance * queries.q.shape[1]


_EVERYTHING = MaskSpec(causal=False)


class _Quarters:
    """The two full quarters of a zigzag hop, one after the other along the batch.

    The first is late queries x early keys. The second is early x early where the keys' device stands
    earlier in the ring, else late x late.
    """

    def __init__(self, queries: Queries, block: Block, earlier: jax.Array):
        self.earlier = earlier
        labels = queries.labels, block.labels
        whole_batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (queries.q.shape[0], x.shape[1])), labels)
        split = self.split_queries
        self.queries = Queries(split(queries.q), whole_batch[0].map(split), queries.expansion)
        self.keys = Block(
            jnp.concatenate((_early(block.keys_values, 2), self._second(block.keys_values, 2)), axis=1),
            whole_batch[1].map(lambda x: jnp.concatenate((_early(x, 1), self._second(x, 1)))),
        )

    def tile(self, scores: Scores) -> Tile:
        """Both quarters as one tile without a mask."""
        mask = HopMask(_EVERYTHING, self.queries.labels, self.keys.labels)
        return Tile(self.queries.q, *self.queries.pair(self.keys), mask, scores)

    def split_queries(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [2 B, T / 2, ...]."""
        return jnp.concatenate((_late(x, 1), self._second(x, 1)))

    def join_state(self, state: SoftmaxState) -> SoftmaxState:
        """Joins the states of both quarters to that of the whole block."""
        first, second = (SoftmaxState(*pair) for pair in zip(*(jnp.split(x, 2) for x in state), strict=True))
        nothing = SoftmaxState(jnp.zeros_like(first.output), jnp.full_like(first.logsumexp, -jnp.inf))
        early = jax.tree.map(lambda x, y: jnp.where(self.earlier, x, y), second, nothing)
        late = jax.tree.map(lambda x, y: jnp.where(self.earlier, x, y), first, merge(first, second))
        return jax.tree.map(lambda x, y: jnp.concatenate((x, y), axis=1), early, late)

    def join_gradients(self, dq: jax.Array, d_block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Joins the gradients of both quarters to those of the whole block."""
        late, second = jnp.split(dq, 2)
        zero = jnp.zeros_like(late)
        early = jnp.where(self.earlier, second, zero)
        late += jnp.where(self.earlier, zero, second)
        early_keys, second = jnp.split(d_block, 2, axis=1)
        zero = jnp.zeros_like(early_keys)
        early_keys += jnp.where(self.earlier, second, zero)
        late_keys = jnp.where(self.earlier, zero, second)
        return jnp.concatenate((early, late), axis=1), jnp.concatenate((early_keys, late_keys), axis=2)

    def _second(self, x: jax.Array, axis: int) -> jax.Array:
        return jnp.where(self.earlier, _early(x, axis), _late(x, axis))


def _early(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, 0, x.shape[axis] // 2, axis=axis)


def _late(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, x.shape[axis] // 2, None, axis=axis)
