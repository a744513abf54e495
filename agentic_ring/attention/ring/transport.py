"""Transport of key blocks between the devices of a ring, and of their gradients back to the owner.

A transport is given one device's block and a function for one hop, and calls the function once for
each block that the queries may attend to. Each call adds to what the calls before it have found.

* The permute that fetches the next block is issued before the compute of this hop, on which it
  does not depend, and never inside a conditional: a device that skipped it would stall the ring.
* In the backward, the gradient of a block travels with it, one hop behind: the sum of the earlier
  hops is under way while this hop computes what to add to it.
* The hops of a ring are a scan, not an unrolled loop: one copy of the kernel to compile whatever the
  ring, and buffers that do not grow with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from agentic_ring.attention.inputs import Schedule
from agentic_ring.attention.kernels.interface import SoftmaxState
from agentic_ring.attention.mask import TokenLabels
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.hop import Block, Origin, Sums

Attend = Callable[[SoftmaxState | None, Block, Origin], SoftmaxState]
"""One hop of the forward: the state, None for that of no block, with one more block."""
Differentiate = Callable[[Sums | None, jax.Array | None, Block, Origin], tuple[Sums, jax.Array]]
"""One hop of the backward: the sums and the gradient of a block's ``keys_values``, both float32 and None for
0, with what this device's queries add to them."""


class Transport(Protocol):
    """Brings blocks of keys to a device's queries; see the module."""

    def forward(self, block: Block, attend: Attend, state: SoftmaxState | None = None) -> SoftmaxState:
        """``state`` with attention to the blocks of all devices, given this device's."""
        ...

    def backward(
        self,
        block: Block,
        differentiate: Differentiate,
        sums: Sums | None = None,
        d_block: jax.Array | None = None,
    ) -> tuple[Sums, jax.Array]:
        """The sums and the gradient of this device's block, with those of all pairs of devices added."""
        ...


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

    def forward(self, block: Block, attend: Attend, state: SoftmaxState | None = None) -> SoftmaxState:
        """See ``Transport``."""
        # As the backward, with no gradient to travel along.
        return self._go_round(block, lambda state, _, *hop: (attend(state, *hop), None), state, None)[0]

    def backward(
        self,
        block: Block,
        differentiate: Differentiate,
        sums: Sums | None = None,
        d_block: jax.Array | None = None,
    ) -> tuple[Sums, jax.Array]:
        """See ``Transport``."""
        return self._go_round(block, differentiate, sums, d_block)

    def _go_round(self, block: Block, visit: Callable, sums: Any, d_block: Any) -> Any:
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

    def forward(self, block: Block, attend: Attend, state: SoftmaxState | None = None) -> SoftmaxState:
        """See ``Transport``."""
        return self.outer.forward(
            block,
            lambda state, block, group: self.inner.forward(block, self._within(group, attend), state),
            state,
        )

    def backward(
        self,
        block: Block,
        differentiate: Differentiate,
        sums: Sums | None = None,
        d_block: jax.Array | None = None,
    ) -> tuple[Sums, jax.Array]:
        """See ``Transport``."""
        return self.outer.backward(
            block,
            lambda sums, d_block, block, group: self.inner.backward(
                block, self._within(group, differentiate), sums, d_block
            ),
            sums,
            d_block,
        )

    def _within(self, group: Origin, function: Callable) -> Callable:
        """The function, told the origin in the whole ring and not in the inner one."""
        size = self.inner.axis.size

        def whole(place: Origin) -> Origin:
            own = 0 if group.own and place.own else None
            return Origin(group.here * size + place.here, group.source * size + place.source, own)

        return lambda *arguments: function(*arguments[:-1], whole(arguments[-1]))


@dataclass(frozen=True)
class Neighbours:
    """The ``before`` and ``after`` blocks around a device's own, each fetched from where it lies.

    For a sliding window over consecutive blocks: devices out of the window exchange nothing.
    """

    axis: RingAxis
    before: int
    after: int

    @property
    def _distances(self) -> tuple[int, ...]:
        return (*range(1, self.before + 1), *range(-1, -self.after - 1, -1))

    def _origin(self, distance: int) -> Origin:
        index = self.axis.index()
        return Origin(index, (index - distance) % self.axis.size, distance)

    def forward(self, block: Block, attend: Attend, state: SoftmaxState | None = None) -> SoftmaxState:
        """See ``Transport``."""
        blocks = [(self.axis.shift(block, distance), self._origin(distance)) for distance in self._distances]
        state = attend(state, block, self._origin(0))
        for fetched, origin in blocks:
            state = attend(state, fetched, origin)
        return state

    def backward(
        self,
        block: Block,
        differentiate: Differentiate,
        sums: Sums | None = None,
        d_block: jax.Array | None = None,
    ) -> tuple[Sums, jax.Array]:
        """See ``Transport``."""
        blocks = [(self.axis.shift(block, distance), distance) for distance in self._distances]
        sums, d_own = differentiate(sums, d_block, block, self._origin(0))
        for fetched, distance in blocks:
            sums, d_fetched = differentiate(sums, None, fetched, self._origin(distance))
            d_own += self.axis.shift(d_fetched, -distance)
        return sums, d_own


@dataclass(frozen=True)
class AllGather:
    """Every device fetches all blocks at once, then works through them.

    One collective instead of P - 1, whose latency is paid once; memory for the whole sequence's keys
    and values on every device, and for their float32 gradients in the backward.
    """

    axis: RingAxis

    def forward(self, block: Block, attend: Attend, state: SoftmaxState | None = None) -> SoftmaxState:
        """See ``Transport``."""
        index = self.axis.index()
        blocks = self.axis.all_gather(block)

        def hop(state: SoftmaxState, number: jax.Array) -> tuple[SoftmaxState, None]:
            source = (index - number) % self.axis.size
            fetched = jax.tree.map(lambda x: x[source], blocks)
            return attend(state, fetched, Origin(index, source)), None

        state = attend(state, block, Origin(index, index, distance=0))
        return jax.lax.scan(hop, state, jnp.arange(1, self.axis.size))[0]

    def backward(
        self,
        block: Block,
        differentiate: Differentiate,
        sums: Sums | None = None,
        d_block: jax.Array | None = None,
    ) -> tuple[Sums, jax.Array]:
        """See ``Transport``."""
        index = self.axis.index()
        blocks = self.axis.all_gather(block)

        def hop(carry: tuple[Sums, jax.Array], number: jax.Array) -> tuple[tuple, None]:
            sums, d_blocks = carry
            source = (index - number) % self.axis.size
            fetched = jax.tree.map(lambda x: x[source], blocks)
            sums, d_fetched = differentiate(sums, None, fetched, Origin(index, source))
            return (sums, d_blocks.at[source].set(d_fetched)), None

        sums, d_block = differentiate(sums, d_block, block, Origin(index, index, distance=0))
        d_blocks = jnp.zeros_like(blocks.keys_values, d_block.dtype).at[index].set(d_block)
        (sums, d_blocks), _ = jax.lax.scan(hop, (sums, d_blocks), jnp.arange(1, self.axis.size))
        return sums, self.axis.sum_scatter(d_blocks)
