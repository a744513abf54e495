"""Collectives over the mesh axes of a ring, or of a ring of rings."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax


@dataclass(frozen=True)
class RingAxis:
    """Rings cut out of one mesh axis, or of several taken together, for use inside ``jax.shard_map``.

    The devices of the axes are counted with the last axis fastest. Devices whose numbers differ by
    multiples of ``stride`` within a run of ``size * stride`` form one ring:

        8 devices      size 8, stride 1     0 1 2 3 4 5 6 7
                       size 4, stride 1     0 1 2 3 | 4 5 6 7            inner rings of 4
                       size 2, stride 4     0 4 | 1 5 | 2 6 | 3 7        the outer rings that join them
    """

    names: tuple[str, ...] = ()
    """Mesh axes; none for a ring of one device."""
    size: int = 1
    stride: int = 1

    @classmethod
    def over(cls, names: str | Iterable[str] | None) -> "RingAxis":
        """One ring over all devices of these mesh axes."""
        names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        return cls(names, prod(jax.lax.axis_size(name) for name in names))

    def split(self, inner: int) -> tuple["RingAxis", "RingAxis"]:
        """(outer, inner): rings of ``inner`` neighbours, and the rings that join them."""
        outer = RingAxis(self.names, self.size // inner, self.stride * inner)
        return outer, RingAxis(self.names, inner, self.stride)

    def index(self) -> jax.Array | int:
        """This device's place in its ring."""
        if self.size == 1:
            return 0
        return jax.lax.axis_index(self.names) // self.stride % self.size

    def shift(self, tree: Any, distance: int) -> Any:
        """Every array of the tree, from the device ``distance`` places before this one in the ring."""
        destinations = [(place + distance) % self.size for place in range(self.size)]
        return jax.tree.map(lambda x: self.permute(x, destinations), tree)

    def permute(self, x: jax.Array, destinations: list[int]) -> jax.Array:
        """Sends ``x`` of the i-th device of each ring to the ``destinations[i]``-th."""
        pairs = [(ring[i], ring[to]) for ring in self._rings() for i, to in enumerate(destinations)]
        return jax.lax.ppermute(x, self.names, pairs)

    def all_to_all(self, x: jax.Array, split_axis: int, concat_axis: int) -> jax.Array:
        """Piece i of ``split_axis`` to device i of the ring; what arrives stands in ring order."""
        return jax.lax.all_to_all(
            x, self.names, split_axis, concat_axis, tiled=True, axis_index_groups=self._groups()
        )

    def all_gather(self, tree: Any) -> Any:
        """Every array of the tree from every device of the ring, along a new first axis."""
        return jax.tree.map(
            lambda x: jax.lax.all_gather(x, self.names, axis_index_groups=self._groups()), tree
        )

    def sum_scatter(self, x: jax.Array) -> jax.Array:
        """Sums over the ring; device i keeps the i-th entry of the first axis."""
        return jax.lax.psum_scatter(x, self.names, axis_index_groups=self._groups())

    def _rings(self) -> list[list[int]]:
        total = prod(jax.lax.axis_size(name) for name in self.names)
        run = self.size * self.stride
        starts = [start + offset for start in range(0, total, run) for offset in range(self.stride)]
        return [[start + place * self.stride for place in range(self.size)] for start in starts]

    def _groups(self) -> list[list[int]] | None:
        rings = self._rings()
        return rings if len(rings) > 1 else None


def vary_alike(arrays: Any, like: Any, axes: Iterable[str] = ()) -> Any:
    """``arrays``, marked as varying over ``axes`` and all mesh axes that any of ``like`` varies over."""
    axes = frozenset(axes).union(*(_varying(x) for x in jax.tree.leaves(like)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, arrays)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
