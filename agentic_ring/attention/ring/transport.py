"""Transport of key blocks between the devices of a ring, and of their gradients back to the owner.

A transport is given one device's block and a function for one hop, and calls the function once for
each block that the queries may attend to. Each call adds to what the calls before it have found. Forward
and backward travel alike; in the forward there is no gradient of a block.

* The permute that fetches the next block is issued before the compute of this hop, on which it
  does not depend, and never inside a conditional: a device that skipped it would stall the ring.
* In the backward, the gradient of a block travels with it, one hop behind: the sum of the earlier
  hops is under way while this hop computes what to add to it.
* The hops of a ring are a scan, not an unrolled loop: one copy of the kernel to compile whatever the
  ring, and buffers that do not grow with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.attention.inputs import Schedule
from agentic_ring.attention.mask import TokenLabels
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.hop import Block, Origin

Found = tuple[Any, Any]
"""What the hops so far have found, each None before the first: the state of the softmax, or in a backward the
``Sums``; and in a backward the gradient of a block's ``keys_values``, float32."""
Visit = Callable[[Any, Any, Block, Origin], Found]
"""One hop: what was found, with what this device's queries find in one more block."""


@dataclass(frozen=True)
class Ring:
    """Every block goes once round the ring (arXiv 2310.01889).

    hop           0          1          2          3         ring of 4
    device 0   q0 . k0    q0 . k3    q0 . k2    q0 . k1
    device 1   q1 . k1    q1 . k0    q1 . k3    q1 . k2      P blocks seen in P - 1 permutes
    ...
    """

    axis: RingAxis
    schedule: Schedule = "unidirectional"
    """"bidirectional" sends half of each block each way round, which uses both directions of every link: half
    the time where transfers are what a hop waits for."""

    def visit_blocks(self, block: Block, visit: Visit, sums: Any = None, d_block: Any = None) -> Found:
        size, index = self.axis.size, self.axis.index()
        own = Origin(index, index, distance=0)
        if size == 1:
            return visit(sums, d_block, block, own)

        def hop(sums: Any, d_parts: tuple, parts: tuple[Block, ...], number: Any) -> tuple[Any, tuple]:
            d_blocks = []
            for part, d_part, direction in zip(parts, d_parts, self._directions, strict=True):
                origin = Origin(index, (index - direction * number) % size)
                sums, d_part = visit(sums, d_part, part, origin)
                d_blocks.append(d_part)
            return sums, tuple(d_blocks)

        def scanned(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
            sums, d_parts, parts = carry
            following, d_parts = self._travel(parts), self._travel(d_parts)
            return (*hop(sums, d_parts, parts, number), following), None

        following = self._travel(self._split(block))
        sums, d_block = visit(sums, d_block, block, own)
        d_parts = tuple(part.keys_values for part in self._split(Block(d_block, TokenLabels())))
        carry, _ = jax.lax.scan(scanned, (sums, d_parts, following), jnp.arange(1, size - 1))
        sums, d_parts, parts = carry
        sums, d_parts = hop(sums, self._travel(d_parts), parts, size - 1)
        return sums, self._join(self._travel(d_parts))

    @property
    def _directions(self) -> tuple[int, ...]:
        return (1,) if self.schedule == "unidirectional" else (1, -1)

    def _travel(self, parts: tuple) -> tuple:
        """Each part one place on in its direction."""
        return tuple(
            self.axis.shift(part, direction) for part, direction in zip(parts, self._directions, strict=True)
        )

    def _split(self, block: Block) -> tuple[Block, ...]:
        """Parts of the block, one a direction, each with half of the block's first and second half.

        So the parts of a zigzag block are zigzag blocks themselves, and every hop stays balanced.
        """
        if self.schedule == "unidirectional" or block.keys_values is None:
            return (block,) * len(self._directions)
        quarters = jnp.split(block.keys_values, 4, axis=2)
        labels = jax.tree.map(lambda x: jnp.split(x, 4, axis=1), block.labels)

        def part(first: int, second: int) -> Block:
            keys_values = jnp.concatenate((quarters[first], quarters[second]), axis=2)
            chosen = jax.tree.map(
                lambda x: jnp.concatenate((x[first], x[second]), axis=1),
                labels,
                is_leaf=lambda x: isinstance(x, list),
            )
            return Block(keys_values, chosen)

        return part(0, 2), part(1, 3)

    def _join(self, parts: tuple[jax.Array, ...]) -> jax.Array:
        if self.schedule == "unidirectional" or parts[0] is None:
            return parts[0]
        (a, b), (c, d) = (jnp.split(part, 2, axis=2) for part in parts)
        return jnp.concatenate((a, c, b, d), axis=2)


@dataclass(frozen=True)
class DoubleRing:
    """A ring of rings: every block goes round the inner ring for each hop on the outer one.

    The transfer to the next inner ring has a whole round of the inner one to hide behind, so that
    the outer links may be slower by the size of the inner ring.
    """

    outer: Ring
    """Joins devices of the same place in their inner rings."""
    inner: Ring
    """A run of neighbours, on fast links."""

    def visit_blocks(self, block: Block, visit: Visit, sums: Any = None, d_block: Any = None) -> Found:
        size = self.inner.axis.size

        def visit_group(sums: Any, d_block: Any, block: Block, group: Origin) -> Found:
            def visit_place(sums: Any, d_block: Any, block: Block, place: Origin) -> Found:
                own = 0 if group.own and place.own else None
                origin = Origin(group.here * size + place.here, group.source * size + place.source, own)
                return visit(sums, d_block, block, origin)

            return self.inner.visit_blocks(block, visit_place, sums, d_block)

        return self.outer.visit_blocks(block, visit_group, sums, d_block)


@dataclass(frozen=True)
class Neighbours:
    """The ``before`` and ``after`` blocks around a device's own, each fetched from where it lies.

    For a sliding window over consecutive blocks: devices out of the window exchange nothing.
    """

    axis: RingAxis
    before: int
    after: int

    def visit_blocks(self, block: Block, visit: Visit, sums: Any = None, d_block: Any = None) -> Found:
        index = self.axis.index()
        distances = (*range(1, self.before + 1), *range(-1, -self.after - 1, -1))
        blocks = [(self.axis.shift(block, distance), distance) for distance in distances]
        sums, d_own = visit(sums, d_block, block, Origin(index, index, distance=0))
        for fetched, distance in blocks:
            origin = Origin(index, (index - distance) % self.axis.size, distance)
            sums, d_fetched = visit(sums, None, fetched, origin)
            d_own = jax.tree.map(jnp.add, d_own, self.axis.shift(d_fetched, -distance))
        return sums, d_own


@dataclass(frozen=True)
class AllGather:
    """Every device fetches all blocks at once, then works through them.

    One collective instead of P - 1, whose latency is paid once; memory for the whole sequence's keys
    and values on every device, and for their float32 gradients in the backward.
    """

    axis: RingAxis

    def visit_blocks(self, block: Block, visit: Visit, sums: Any = None, d_block: Any = None) -> Found:
        index = self.axis.index()
        blocks = self.axis.all_gather(block)

        def put(d_blocks: Any, source: Any, d_block: Any) -> Any:
            return jax.tree.map(lambda x, part: x.at[source].set(part), d_blocks, d_block)

        def hop(carry: Found, number: jax.Array) -> tuple[Found, None]:
            sums, d_blocks = carry
            source = (index - number) % self.axis.size
            fetched = jax.tree.map(lambda x: x[source], blocks)
            sums, d_fetched = visit(sums, None, fetched, Origin(index, source))
            return (sums, put(d_blocks, source, d_fetched)), None

        sums, d_block = visit(sums, d_block, block, Origin(index, index, distance=0))
        d_blocks = jax.tree.map(lambda x: jnp.zeros_like(blocks.keys_values, x.dtype), d_block)
        carry = sums, put(d_blocks, index, d_block)
        (sums, d_blocks), _ = jax.lax.scan(hop, carry, jnp.arange(1, self.axis.size))
        return sums, jax.tree.map(self.axis.sum_scatter, d_blocks)


Transport = Ring | DoubleRing | Neighbours | AllGather
"""``visit_blocks`` returns what is found in the blocks of all devices, given this device's ``block``; the
gradient is that of this device's block, from the queries of all devices."""
