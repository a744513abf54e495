"""Attention over a sequence that is sharded over devices, by one of these strategies.

local          every device works on whole sequences; nothing moves
ring           keys and values travel round the ring; each device keeps its queries (arXiv 2310.01889)
all_gather     every device fetches all keys and values first
ulysses        an all-to-all gives every device some heads of the whole sequence, and another
               brings the result back (arXiv 2309.14509)
ulysses_ring   Ulysses within runs of neighbours, a ring over the runs (arXiv 2405.07719)
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.inputs import AttentionInputs, AttentionOptions, Layout
from agentic_ring.attention.kernels.interface import Kernel, SoftmaxState
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.derivative import Route, attend_to_all_blocks
from agentic_ring.attention.ring.hop import Hop
from agentic_ring.attention.ring.layout import from_layout, inverse_order, order, shard_order, to_layout
from agentic_ring.attention.ring.transport import AllGather, DoubleRing, Neighbours, Ring, Transport
from agentic_ring.attention.scores import Dropout, Scores
from agentic_ring.errors import ArgumentError


@dataclass(frozen=True)
class ShardedAttention:
    """Attention over a sequence that is sharded over devices: everything static about it."""

    options: AttentionOptions
    """Neither strategy nor layout is "auto"."""
    kernel: Kernel
    inner: int = 1
    """Size of the inner rings of a double ring; 1 for a plain one."""
    ulysses: int = 1
    """Devices that exchange heads for tokens; 1 for none."""

    @property
    def layout(self) -> Layout:
        """The order in which the devices work on the sequence."""
        assert self.options.layout != "auto", "the layout is chosen before anything runs"
        return self.options.layout

    @property
    def given(self) -> Layout:
        """The order in which the devices hold the sequence."""
        return self.layout if self.options.permuted else "contiguous"

    def attend_whole_sequence(
        self, axis: RingAxis, inputs: AttentionInputs, first_row: jax.Array, first_head: jax.Array
    ) -> SoftmaxState:
        """Attention of this device's queries to the whole sequence, which the devices of ``axis`` share.

        Dropout counts this device's rows and query heads from ``first_row`` and ``first_head``.

        Returns:
          (output [B, T, N, V] in q's dtype, logsumexp [B, T, N] in its ``state_dtype``).
        """
        options = self.options
        scale = inputs.q.shape[3] ** -0.5 if options.scale is None else options.scale
        dropout = Dropout.from_key(options.dropout_rate, inputs.dropout_key, first_row, first_head)
        scores = Scores(scale, options.soft_cap, inputs.slopes, inputs.windows, dropout)
        inputs = replace(inputs, slopes=None, windows=None, dropout_key=None)
        if self.ulysses == 1:
            return self._attend_in_layout(axis, inputs, scores)
        permuted = self.given != "contiguous" and inputs.query.positions is None
        if permuted and self.ulysses < axis.size:
            # Blocks of neighbours do not join to a block of this order.
            inputs = _with_positions(inputs, self.given, axis)
        outer, inner = axis.split(self.ulysses)
        heads = inputs.q.shape[2] // self.ulysses

        def of_own_heads(x: jax.Array, axis: int = 0) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, inner.index() * heads, heads, axis)

        scores = scores.map_heads(of_own_heads).moved(jnp.int32(0), jnp.asarray(inner.index() * heads))
        sinks = None if inputs.sinks is None else of_own_heads(inputs.sinks)
        expansion = jax.tree.map(lambda x: of_own_heads(x, 1), inputs.expansion)
        # Where there are fewer key heads than devices, several devices get the same.
        copies = max(1, self.ulysses // inputs.k.shape[2])
        k, v = (jnp.repeat(x, copies, axis=2) for x in (inputs.k, inputs.v))
        q, k, v = (inner.all_to_all(x, split_axis=2, concat_axis=1) for x in (inputs.q, k, v))
        query, key = jax.tree.map(lambda x: _joined(inner.all_gather(x)), (inputs.query, inputs.key))
        joined = AttentionInputs(q, k, v, query=query, key=key)
        weights: dict[str, Any] = {"sinks": sinks, "expansion": expansion}
        if permuted and self.ulysses == axis.size:
            # Each device has the whole sequence, so that its order is known and no mask needs positions.
            places = order(self.given, q.shape[1], axis.size)
            joined = jax.tree.map(lambda x: _permuted(x, inverse_order(places)), joined)
            state = self._attend_in_layout(outer, replace(joined, **weights), scores)
            state = jax.tree.map(lambda x: _permuted(x, places), state)
        else:
            state = self._attend_in_layout(outer, replace(joined, **weights), scores)
        return jax.tree.map(lambda x: inner.all_to_all(x, split_axis=1, concat_axis=2), state)

    def _attend_in_layout(self, axis: RingAxis, inputs: AttentionInputs, scores: Scores) -> SoftmaxState:
        moved = self.layout != self.given and axis.size > 1
        if moved:
            tokens = replace(inputs, sinks=None, expansion=None)
            tokens = jax.tree.map(lambda x: to_layout(x, self.layout, axis), tokens)
            inputs = replace(tokens, sinks=inputs.sinks, expansion=inputs.expansion)
        transport = self._transport(axis, inputs)
        unplaced = inputs.query.positions is None
        by_position = scores.by_position or inputs.key.hidden is not None
        tiled = unplaced and not by_position and self._tiles(axis, transport, inputs)
        if not tiled and unplaced and (self.options.mask.by_position or by_position):
            inputs = _with_positions(inputs, self.layout, axis)
        hop = Hop(self.kernel, self.options.mask, self.layout if tiled else None)
        route = Route(transport, hop, axis.names, self.options.return_logsumexp)
        state = attend_to_all_blocks(route, inputs, scores)
        return jax.tree.map(lambda x: from_layout(x, self.layout, axis), state) if moved else state

    def _transport(self, axis: RingAxis, inputs: AttentionInputs) -> Transport:
        """How blocks of keys travel."""
        mask, block = self.options.mask, inputs.k.shape[1]
        if axis.size == 1:
            return Ring(axis)
        if self.options.strategy == "all_gather":
            return AllGather(axis)
        # Whether a device's queries have the same positions as its keys.
        aligned = self.layout == "contiguous" and inputs.query.positions is None
        aligned = aligned and inputs.q.shape[1] == block
        if mask.window is not None and aligned and not mask.prefix:
            before = -(-(mask.window - 1) // block)
            after = 0 if mask.causal else before
            if before + after < axis.size - 1:
                return Neighbours(axis, before, after)
        schedule = self.options.schedule
        if schedule == "bidirectional" and block % 4:
            raise ArgumentError(
                f'schedule is "bidirectional" but a device holds {block} tokens; make it a multiple of 4'
            )
        if self.inner > 1:
            outer, inner = axis.split(self.inner)
            return DoubleRing(Ring(outer), Ring(inner, schedule))
        return Ring(axis, schedule)

    def _tiles(self, axis: RingAxis, transport: Transport, inputs: AttentionInputs) -> bool:
        """Whether the mask of every hop follows from where its block comes from; see ``ring.hop``."""
        mask = self.options.mask
        if axis.size == 1:
            return True
        if not mask.by_position or mask.prefix or inputs.q.shape[1] != inputs.k.shape[1]:
            return False
        if mask.window is not None:
            return isinstance(transport, Neighbours)
        return self.layout in ("contiguous", "zigzag")


def _with_positions(inputs: AttentionInputs, layout: Layout, axis: RingAxis) -> AttentionInputs:
    """The inputs, labelled with the positions that this device's tokens have in this layout."""

    def positions(x: jax.Array) -> jax.Array:
        length = x.shape[1] * axis.size
        return jnp.asarray(shard_order(layout, length, axis.size, axis.index()), jnp.int32)[None]

    query = replace(inputs.query, positions=positions(inputs.q))
    return replace(inputs, query=query, key=replace(inputs.key, positions=positions(inputs.k)))


def _permuted(x: jax.Array, places: np.ndarray) -> jax.Array:
    """[B, T, ...] in another order of its tokens, a permutation."""
    return x.at[:, places].get(unique_indices=True)


def _joined(gathered: jax.Array) -> jax.Array:
    """[devices, B, T] -> [B, devices * T]."""
    return jnp.moveaxis(gathered, 0, 1).reshape(gathered.shape[1], -1)
