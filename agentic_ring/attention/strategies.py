"""How a sequence that is sharded over devices is attended to, and which way is best.

ring           keys and values travel round the ring; each device keeps its queries
all_gather     every device fetches all keys and values first
ulysses        an all-to-all gives every device some heads of the whole sequence, and another
               brings the result back (arXiv 2309.14509)
ulysses_ring   Ulysses within runs of neighbours, a ring over the runs (arXiv 2405.07719)
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.interface import Kernel
from agentic_ring.attention.mask import MaskSpec, TokenLabels
from agentic_ring.attention.ring.axis import RingAxis
from agentic_ring.attention.ring.derivative import Route, attend
from agentic_ring.attention.ring.exchange import from_layout, to_layout
from agentic_ring.attention.ring.hop import Hop
from agentic_ring.attention.ring.layout import Layout, shard_order
from agentic_ring.attention.ring.transport import AllGather, DoubleRing, Neighbours, Ring, Schedule, Transport
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ArgumentError

Strategy = Literal["local", "ring", "all_gather", "ulysses", "ulysses_ring"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Sharded:
    """What is static about attention over a sharded sequence.

    Attributes:
      mask: static part of the mask.
      kernel: computes a tile.
      given: the order in which the devices hold the sequence.
      layout: the order in which they work on it.
      gather: whether keys are gathered at once and not passed round.
      inner: size of the inner rings of a double ring; 1 for a plain one.
      ulysses: devices that exchange heads for tokens; 1 for none.
      schedule: of the ring.
    """

    mask: MaskSpec
    kernel: Kernel
    given: Layout = "contiguous"
    layout: Layout = "contiguous"
    gather: bool = False
    inner: int = 1
    ulysses: int = 1
    schedule: Schedule = "unidirectional"

    def attend(
        self,
        axis: RingAxis,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sinks: jax.Array | None,
        query: TokenLabels,
        key: TokenLabels,
        scores: Scores,
    ) -> jax.Array:
        """Attention of this device's queries to the whole sequence; arguments as in ``attend``."""
        if self.ulysses == 1:
            return self._attend(axis, q, k, v, sinks, query, key, scores)
        if self.given != "contiguous":
            # Blocks of neighbours do not join to a block of this order.
            query, key = _placed(self.given, axis, q, k, query, key)
        outer, inner = axis.split(self.ulysses)
        heads = q.shape[2] // self.ulysses
        if scores.dropout is not None:
            first_head = scores.dropout.first_head + inner.index() * heads
            scores = replace(scores, dropout=replace(scores.dropout, first_head=first_head))
        if sinks is not None:
            sinks = jax.lax.dynamic_slice_in_dim(sinks, inner.index() * heads, heads)
        copies = max(1, self.ulysses // k.shape[2])  # fewer key heads than devices: several get the same
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
        q, k, v = (inner.all_to_all(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        query, key = jax.tree.map(lambda x: _joined(inner.all_gather(x)), (query, key))
        output = self._attend(outer, q, k, v, sinks, query, key, scores)
        return inner.all_to_all(output, split_axis=1, concat_axis=2)

    def _attend(
        self,
        axis: RingAxis,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sinks: jax.Array | None,
        query: TokenLabels,
        key: TokenLabels,
        scores: Scores,
    ) -> jax.Array:
        moved = self.layout != self.given and axis.size > 1
        if moved:
            q, k, v, query, key = jax.tree.map(
                lambda x: to_layout(x, self.layout, axis), (q, k, v, query, key)
            )
        alike = self.layout == "contiguous" and query.positions is None and q.shape[1] == k.shape[1]
        transport = self._transport(axis, k.shape[1], alike)
        tiled = query.positions is None and scores.dropout is None and self._tiles(axis, transport, q, k)
        if not tiled and query.positions is None and (self.mask.by_position or scores.dropout is not None):
            query, key = _placed(self.layout, axis, q, k, query, key)
        route = Route(transport, Hop(self.kernel, self.mask, self.layout if tiled else None), axis.names)
        output = attend(route, q, k, v, sinks, query, key, scores)
        return from_layout(output, self.layout, axis) if moved else output

    def _transport(self, axis: RingAxis, block: int, alike: bool) -> Transport:
        """How blocks of this many keys travel; ``alike``: a device's queries stand where its keys do."""
        if axis.size == 1:
            return Ring(axis)
        if self.gather:
            return AllGather(axis)
        if self.mask.window is not None and alike and not self.mask.prefix:
            before = -(-(self.mask.window - 1) // block)
            after = 0 if self.mask.causal else before
            if before + after < axis.size - 1:
                return Neighbours(axis, before, after)
        if self.schedule == "bidirectional" and block % 4:
            raise ArgumentError(
                f'schedule is "bidirectional" but a device holds {block} tokens; make it a multiple of 4'
            )
        if self.inner > 1:
            outer, inner = axis.split(self.inner)
            return DoubleRing(Ring(outer), Ring(inner, self.schedule))
        return Ring(axis, self.schedule)

    def _tiles(self, axis: RingAxis, transport: Transport, q: jax.Array, k: jax.Array) -> bool:
        """Whether the mask of every hop follows from where its block comes from; see ``hop``."""
        if axis.size == 1:
            return True
        if not self.mask.by_position or self.mask.prefix or q.shape[1] != k.shape[1]:
            return False
        if self.mask.window is not None:
            return isinstance(transport, Neighbours)
        return self.layout != "striped"


def _placed(
    layout: Layout, axis: RingAxis, q: jax.Array, k: jax.Array, query: TokenLabels, key: TokenLabels
) -> tuple[TokenLabels, TokenLabels]:
    """The labels with the positions that this device's tokens have in this layout."""

    def positions(x: jax.Array) -> jax.Array:
        length = x.shape[1] * axis.size
        return jnp.asarray(shard_order(layout, length, axis.size, axis.index()), jnp.int32)[None]

    return replace(query, positions=positions(q)), replace(key, positions=positions(k))


def _joined(gathered: jax.Array) -> jax.Array:
    """[devices, B, T] -> [B, devices * T]."""
    return jnp.moveaxis(gathered, 0, 1).reshape(gathered.shape[1], -1)
