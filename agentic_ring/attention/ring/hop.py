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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from agentic_ring.attention.inputs import Expansion, Layout
from agentic_ring.attention.kernels.interface import (
    Gradients,
    Kernel,
    Saved,
    SoftmaxState,
    Tile,
    merge,
    state_dtype,
)
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Scores

Tree = TypeVar("Tree")


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
    """What stays on a device: its queries [B, T, N, H] and their labels."""

    q: jax.Array
    labels: TokenLabels
    expansion: Expansion | None = None
    """Makes keys and values of a block that holds latents; else None."""

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
    """The device that a block of keys comes from."""

    here: jax.Array | int
    """This device's place in the ring."""
    source: jax.Array | int
    """The place of the device whose block it is."""
    distance: int | None = None
    """How many places before this device that is, where it is static; 0 is its own block."""

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
    """The static part of a hop."""

    kernel: Kernel
    spec: MaskSpec
    layout: Layout | None
    """The order of the sequence over the ring, where tiles follow from it; None where the labels carry
    positions instead, or where no token's place matters."""

    def forward(
        self, state: SoftmaxState | None, queries: Queries, block: Block, origin: Origin, scores: Scores
    ) -> SoftmaxState:
        """Attention of the queries to the blocks of ``state``, None for no block, and to this one."""

        def with_whole(spec: MaskSpec, offset: int = 0) -> SoftmaxState:
            mask = HopMask(spec, queries.labels, block.labels, offset)
            more = self.kernel.forward(Tile(queries.q, *queries.pair(block), mask, scores))
            return more if state is None else merge(state, more)

        def with_quarter(quarter: "_Quarter", state: SoftmaxState) -> SoftmaxState:
            more = self.kernel.forward(quarter.tile(scores))
            merged = merge(jax.tree.map(quarter.rows.of, state), more)
            return jax.tree.map(quarter.rows.put, state, merged)

        return self._by_tiles(queries, block, origin, state, with_whole, with_quarter)

    def backward(
        self,
        sums: Sums | None,
        d_block: jax.Array | None,
        queries: Queries,
        saved: Saved,
        block: Block,
        origin: Origin,
        scores: Scores,
    ) -> tuple[Sums, jax.Array]:
        """The sums, and the gradient of the block's ``keys_values``, with this hop added; None is 0."""

        def with_whole(spec: MaskSpec, offset: int = 0) -> tuple[Sums, jax.Array]:
            mask = HopMask(spec, queries.labels, block.labels, offset)
            tile = Tile(queries.q, *queries.pair(block), mask, scores)
            more, d_tile = queries.gradients(block, self.kernel.backward(tile, saved))
            return _plus(sums, more), _plus(d_block, d_tile)

        def with_quarter(quarter: "_Quarter", found: tuple[Sums, jax.Array]) -> tuple[Sums, jax.Array]:
            gradients = self.kernel.backward(quarter.tile(scores), jax.tree.map(quarter.rows.of, saved))
            return quarter.add(*found, *quarter.queries.gradients(quarter.block, gradients))

        if d_block is None and self.layout is not None and not origin.own:
            d_block = jnp.zeros_like(block.keys_values, state_dtype(block.keys_values.dtype))
        return self._by_tiles(queries, block, origin, (sums, d_block), with_whole, with_quarter)

    def _by_tiles(
        self,
        queries: Queries,
        block: Block,
        origin: Origin,
        carry: Any,
        with_whole: Callable[..., Any],
        with_quarter: Callable[["_Quarter", Any], Any],
    ) -> Any:
        """The carry after the whole block, or after what of it the queries attend to."""
        if self.layout is None or origin.own:
            return with_whole(self.spec)
        if self.layout == "zigzag":

            def visit(number: jax.Array, carry: Any) -> Any:
                return with_quarter(_Quarter.of(number, queries, block, origin.earlier), carry)

            return jax.lax.fori_loop(0, 2, visit, carry)
        attends, spec, offset = origin.earlier, MaskSpec(causal=False), 0
        if self.spec.window is not None:
            assert origin.distance is not None, "the hops of a window are unrolled"
            # A block that came round the end of the sequence is no neighbour.
            attends = jnp.asarray(origin.source == origin.here - origin.distance)
            spec, offset = self.spec, origin.distance * queries.q.shape[1]
        return jax.lax.cond(attends, lambda: with_whole(spec, offset), lambda: carry)


class _Half(NamedTuple):
    """Half of a block of the sequence, in zigzag order: number 0 is the early one, 1 the late one."""

    number: jax.Array

    def of(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """The half of an array whose ``axis`` is the block's tokens."""
        size = x.shape[axis] // 2
        return jax.lax.dynamic_slice_in_dim(x, self.number * size, size, axis)

    def put(self, x: jax.Array, half: jax.Array, axis: int = 1) -> jax.Array:
        """The array with another half."""
        return jax.lax.dynamic_update_slice_in_dim(x, half, self.number * half.shape[axis], axis)


class _Quarter(NamedTuple):
    """A full quarter of a zigzag hop: half of the queries by half of the keys.

    The two are worked on one after the other: side by side, along the batch, they would need copies of
    their queries, keys and gradients at once, which are as large as all that a hop reads and returns.
    """

    rows: _Half
    keys: _Half
    queries: Queries
    block: Block

    @classmethod
    def of(cls, number: jax.Array, queries: Queries, block: Block, earlier: jax.Array) -> "_Quarter":
        """Quarter 0 is late queries by early keys.

        Quarter 1 is early by early where the keys' device stands ``earlier`` in the ring, else late by late.
        """
        same = jnp.where(earlier, 0, 1)
        rows, keys = _Half(jnp.where(number == 0, 1, same)), _Half(jnp.where(number == 0, 0, same))
        return cls(
            rows,
            keys,
            queries._replace(q=rows.of(queries.q), labels=jax.tree.map(rows.of, queries.labels)),
            Block(keys.of(block.keys_values, 2), jax.tree.map(keys.of, block.labels)),
        )

    def tile(self, scores: Scores) -> Tile:
        """The quarter as a tile without a mask."""
        mask = HopMask(MaskSpec(causal=False), self.queries.labels, self.block.labels)
        return Tile(self.queries.q, *self.queries.pair(self.block), mask, scores)

    def add(self, sums: Sums, d_block: jax.Array, more: Sums, d_quarter: jax.Array) -> tuple[Sums, jax.Array]:
        """The gradients of whole blocks with those of this quarter added."""
        dq = self.rows.put(sums.dq, self.rows.of(sums.dq) + more.dq)
        d_expansion = _plus(sums.d_expansion, more.d_expansion)
        return Sums(dq, d_expansion), self.keys.put(d_block, self.keys.of(d_block, 2) + d_quarter, 2)


def _plus(sums: Tree | None, more: Tree) -> Tree:
    return more if sums is None else jax.tree.map(jnp.add, sums, more)
