"""The device mesh, and the sharding rules that map arrays onto it.

Axes, outermost first:

    stage    groups of consecutive layers, between which activations travel (``models.pipeline``); embeddings,
             heads and losses, which have no layers, process independent sequences
    data     independent sequences; parameters are copied
    fsdp     independent sequences; parameters are sharded, gathered layer by layer
    ring     the sequence; keys and values travel round the ring; parameters are sharded over it as well
    tensor   attention heads and feedforward features
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from agentic_ring.errors import MeshError
from agentic_ring.jax_settings import disable_cache_for_cpu_rings, skip_absent_tpus

AXES = ("stage", "data", "fsdp", "ring", "tensor")


@dataclass(frozen=True)
class MeshShape:
    """Number of devices along each axis; ``ring=None`` takes all devices that the other axes leave."""

    data: int = 1
    fsdp: int = 1
    ring: int | None = None
    tensor: int = 1
    stage: int = 1


def make_mesh(shape: MeshShape = MeshShape(), devices: Sequence[Any] | None = None) -> Mesh:
    """Builds the (stage, data, fsdp, ring, tensor) mesh over ``devices`` (all devices by default).

    Raises:
      MeshError: an axis is smaller than 1, or the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    for axis in AXES:
        size = getattr(shape, axis)
        if size is not None and size < 1:
            raise MeshError(f"mesh axis {axis} is {size}; it must be at least 1")
    others = shape.stage * shape.data * shape.fsdp * shape.tensor
    ring = max(1, len(devices) // others) if shape.ring is None else shape.ring
    sizes = (shape.stage, shape.data, shape.fsdp, ring, shape.tensor)
    if math.prod(sizes) != len(devices):
        raise MeshError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {math.prod(sizes)} devices, "
            f"but there are {len(devices)}; choose axes whose product is {len(devices)}"
        )
    disable_cache_for_cpu_rings(devices[0].platform, len(devices))
    # Neighbours in a ring are neighbours in a TPU's torus, as far as the axes allow.
    placed = rings(devices, others) if shape.tensor == 1 and ring > 1 else None
    if placed is None:
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_on_first_devices(shape: MeshShape) -> Mesh:
    """Builds the mesh of a saved run, without stages, on the first local devices; ``ring=None`` is 1.

    Raises:
      MeshError: there are fewer devices than the mesh has.
    """
    needed = math.prod(size or 1 for size in asdict(shape).values())
    return without_stages(make_mesh(shape, jax.devices()[:needed]))


def shape_with_ring(ring: int | None, devices: int, stages: int = 1) -> MeshShape:
    """A ring of this size, or of all devices, in each of ``stages``; the remaining devices on the data axis.

    Raises:
      MeshError: the stages do not divide the devices, or the ring those of a stage.
    """
    per_stage = devices // max(stages, 1)
    ring = per_stage if ring is None else ring
    where = "" if stages == 1 else " of a stage"
    for parts, whole, complaint in (
        (stages, devices, f"{stages} stages do not divide {devices} devices"),
        (ring, per_stage, f"a ring of {ring} does not divide {per_stage} devices{where}"),
    ):
        if parts < 1 or whole % parts:
            raise MeshError(f"{complaint}; choose one of {', '.join(map(str, _divisors(whole)))}")
    return MeshShape(data=per_stage // ring, ring=ring, stage=stages)


def without_stages(mesh: Mesh) -> Mesh:
    """The mesh of the same devices with its stages on the data axis, for inference."""
    sizes = {**mesh.shape, "stage": 1, "data": mesh.shape["stage"] * mesh.shape["data"]}
    devices = mesh.devices.reshape([sizes[axis] for axis in AXES])
    return Mesh(devices, AXES, axis_types=mesh.axis_types)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axes. Weights name their logical axes, never mesh axes.

    ``embed`` is sharded over fsdp and ring together, so that each device of a long ring stores as few
    parameters as with plain FSDP over the same devices (arXiv 2310.01889, section 5.1: "FSDP only").
    An axis that does not divide it goes to another dimension of the weight.
    """

    batch: tuple[str, ...] = ("data", "fsdp", "stage")
    sequence: tuple[str, ...] = ("ring",)
    embed: tuple[str, ...] = ("fsdp", "ring")
    heads: tuple[str, ...] = ("tensor",)
    ffn: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    layer: tuple[str, ...] = ("stage",)

    def spec(self, *logical_axes: str | None) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes; None is an unsharded dimension.

        Raises:
          MeshError: an axis name is unknown, or two dimensions would use one mesh axis.
        """
        return PartitionSpec(*(axes or None for axes in self._mesh_axes(logical_axes)))

    def without(self, mesh_axes: tuple[str, ...]) -> "ShardingRules":
        """The rules of arrays that are not sharded over these mesh axes."""
        return ShardingRules(
            **{name: tuple(a for a in axes if a not in mesh_axes) for name, axes in vars(self).items()}
        )

    def of_keys(self, heads: int) -> "ShardingRules":
        """The rules of keys and values of so many heads: all devices of the heads' axes have a single one."""
        return replace(self, heads=()) if heads == 1 else self

    def _mesh_axes(self, logical_axes: tuple[str | None, ...]) -> list[tuple[str, ...]]:
        known = [field.name for field in fields(self)]
        unknown = [axis for axis in logical_axes if axis is not None and axis not in known]
        if unknown:
            raise MeshError(f"unknown logical axis {unknown[0]!r}; the rules know {', '.join(known)}")
        entries = [() if axis is None else getattr(self, axis) for axis in logical_axes]
        used = [mesh_axis for entry in entries for mesh_axis in entry]
        if len(used) != len(set(used)):
            raise MeshError(f"logical axes {logical_axes} put one mesh axis on two dimensions: {entries}")
        return entries

    def sharding(
        self, mesh: Mesh | AbstractMesh, shape: tuple[int, ...], logical_axes: tuple[str | None, ...]
    ) -> NamedSharding:
        """The sharding of an array of this shape, over as many devices as its dimensions allow.

        Each mesh axis of ``spec`` stays where it is if it divides that dimension. Axes of ``embed``
        that do not divide it may go to any other dimension: a weight [3200, 8640] on fsdp 128 x ring 4 is cut
        into 128 rows and, as 3200 / 512 is no whole number, 4 columns. An axis that divides no
        dimension is left out.

        Leading dimensions beyond ``logical_axes`` are stacked layers; a mesh may lack their axis.
        """
        stacked = len(shape) - len(logical_axes)
        axes_of = (*("layer",) * stacked, *logical_axes)
        staged = replace(self, layer=tuple(axis for axis in self.layer if axis in mesh.axis_names))
        fixed = [
            () if axis == "embed" else _dividing_axes(mesh, size, axes)
            for size, axes, axis in zip(shape, staged._mesh_axes(axes_of), axes_of, strict=True)
        ]
        if "embed" in logical_axes:
            home = stacked + logical_axes.index("embed")
            fixed = _spread(mesh, shape, fixed, self.embed, home, range(stacked, len(shape)))
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in fixed)))


def batch_shards(mesh: Mesh | AbstractMesh, rules: ShardingRules = ShardingRules()) -> int:
    """Returns the number of parts that a batch is cut into on this mesh."""
    return devices_along(mesh, rules.batch)


def rows_per_shard(batch_size: int, mesh: Mesh, rules: ShardingRules = ShardingRules()) -> int:
    """Returns the number of rows of a batch in each part that it is cut into on this mesh.

    Raises:
      MeshError: the batch does not divide evenly; names the rings of these devices with which it does.
    """
    shards = batch_shards(mesh, rules)
    if batch_size % shards:
        devices = shards * devices_along(mesh, rules.sequence)
        stages = devices_along(mesh, tuple(axis for axis in rules.layer if axis in rules.batch))
        fitting = [ring for ring in _divisors(devices // stages) if batch_size * ring % devices == 0]
        raise MeshError(
            f"a batch of {batch_size} rows does not divide over {shards} parts of this mesh, and a run keeps "
            "the batch with which it started; with these devices, choose "
            + (f"a ring of {' or '.join(map(str, fitting))}" if fitting else "fewer stages")
        )
    return batch_size // shards


def devices_along(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along these axes together; 1 for an empty mesh.

    Raises:
      MeshError: the mesh lacks one of them.
    """
    if mesh.empty:
        return 1
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        raise MeshError(
            f"the sharding rules name the mesh axis {missing[0]!r}, but the mesh has "
            f"{', '.join(map(repr, mesh.axis_names))}; give the model rules that name only its axes: "
            "ShardingRules(batch=..., sequence=..., embed=..., heads=..., ffn=..., vocab=...)"
        )
    return math.prod(mesh.shape[axis] for axis in axes)


def check_divides(what: str, size: int, devices: int, axes: tuple[str, ...]) -> None:
    """Raises a MeshError unless the ``devices`` along these axes divide the size of ``what``."""
    if size % devices:
        raise MeshError(
            f"the {what} is {size}, which does not divide over the {devices} devices of the mesh axes "
            f"{' x '.join(axes)}; make it a multiple of {devices} or choose another mesh"
        )


def _dividing_axes(mesh: Mesh | AbstractMesh, size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The longest prefix of the mesh axes whose product divides ``size``."""
    while axes and size % devices_along(mesh, axes):
        axes = axes[:-1]
    return axes


def _spread(
    mesh: Mesh | AbstractMesh,
    shape: tuple[int, ...],
    fixed: list[tuple[str, ...]],
    axes: tuple[str, ...],
    home: int,
    dimensions: range,
) -> list[tuple[str, ...]]:
    """Adds each of ``axes`` to a dimension of ``fixed``, so that as many devices as possible share the array.

    Ties go to most devices on ``home``. Weights have few dimensions and meshes few axes, so all are tried.
    """

    def placed(places: tuple[int | None, ...]) -> list[tuple[str, ...]]:
        return [
            (*entry, *(axis for axis, place in zip(axes, places, strict=True) if place == dimension))
            for dimension, entry in enumerate(fixed)
        ]

    def shards(choice: list[tuple[str, ...]]) -> list[int]:
        return [devices_along(mesh, entry) for entry in choice]

    choices = map(placed, itertools.product((None, *dimensions), repeat=len(axes)))
    possible = (x for x in choices if not any(map(operator.mod, shape, shards(x))))
    return max(possible, key=lambda choice: (math.prod(shards(choice)), shards(choice)[home]))


def constrain(array: jax.Array, rules: ShardingRules, *logical_axes: str | None) -> jax.Array:
    """Constrains an array's sharding on the ambient mesh of ``jax.set_mesh``; no mesh, no effect.

    Where the devices of an axis do not divide the array, all of them have the whole.

    Raises:
      MeshError: the mesh lacks an axis that the rules name.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return array
    for axis in logical_axes:
        if axis is not None:
            devices_along(mesh, getattr(rules, axis))
    axes_of = rules.without(mesh.manual_axes)._mesh_axes(logical_axes)
    dividing = (_dividing_axes(mesh, *each) for each in zip(array.shape, axes_of, strict=True))
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*(axes or None for axes in dividing)))


def shared_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Sizes of the axes over which global arrays are sharded: of more than one device, and not manual.

    Within a ``jax.shard_map`` over some axes, arrays are shards along those and global along the others.
    """
    manual = mesh.abstract_mesh.manual_axes
    return {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in manual}


def mesh_platform(mesh: Mesh | AbstractMesh | None = None) -> str:
    """Returns "cpu", "gpu" or "tpu"; None is the mesh of ``jax.set_mesh`` and ``jax.shard_map``."""
    name = mesh_device(mesh).platform
    return "gpu" if name in ("cuda", "rocm") else name


def mesh_device(mesh: Mesh | AbstractMesh | None = None) -> Any:
    """Returns a device of the mesh, None as above; that of an abstract mesh describes its kind only."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0]
    device = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).abstract_device
    return jax.devices()[0] if device is None else device


def simulate_cpu_devices(count: int = 8) -> None:
    """Simulates ``count`` devices on one CPU; call before anything asks JAX for its devices.

    Has no effect if JAX finds an accelerator. A machine with accelerators usually has 8.
    """
    skip_absent_tpus()
    jax.config.update("jax_num_cpu_devices", count)


def rings(devices: Sequence[Any], count: int) -> np.ndarray | None:
    """Arranges TPU devices in ``count`` rings, such that a ring's neighbours are neighbours in the chip grid.

    Generations with flat pods (v2, v3, v5e, v6e) link each chip to its neighbours in a rectangle. A ring in
    row order would jump from the end of each row to the beginning of the next. On v5e XLA then sends every
    hop of the ring synchronously: with 256 devices all hops are exposed, against one of 766 otherwise (read
    from compiled programs). A closed tour of the rectangle has no such jump::

        0 - 1 - 2 - 3        each step is one link; the last chip is the first one's neighbour
        |           |
        7   6 - 5 - 4        needs an even side, which every pod has
        :   :

    The cores of a chip follow one another.

    Returns:
      [count, devices / count]; None where the devices are no TPU chips that fill a flat rectangle, or the
      rectangle does not divide into such rings.
    """
    # Devices of a GPU compile target have coordinates too, but no cores.
    if not all(hasattr(device, "coords") and hasattr(device, "core_on_chip") for device in devices):
        return None
    chips: dict[tuple[int, int], list[Any]] = {}
    for device in sorted(devices, key=lambda device: device.core_on_chip):
        x, y, z = device.coords
        if z != 0:
            return None
        chips.setdefault((x, y), []).append(device)
    columns, rows = (1 + max(place[axis] for place in chips) for axis in (0, 1))
    if len(chips) != rows * columns or len({len(cores) for cores in chips.values()}) > 1:
        return None
    for across in range(1, count + 1):
        down = count // across
        if count % across or rows % down or columns % across:
            continue
        height, width = rows // down, columns // across
        if (tour := closed_tour(height, width)) is not None:
            corners = itertools.product(range(0, rows, height), range(0, columns, width))
            order = [[core for y, x in tour for core in chips[left + x, top + y]] for top, left in corners]
            return np.array(order, dtype=object)
    return None


def closed_tour(rows: int, columns: int) -> list[tuple[int, int]] | None:
    """Returns all (row, column) of a rectangle, each a neighbour of the one before, the last of the first.

    None where there is no such tour: a single row or column of more than two, or both sides odd.
    """
    if rows * columns <= 2:
        return [(row, column) for row in range(rows) for column in range(columns)]
    if min(rows, columns) < 2 or (rows % 2 and columns % 2):
        return None
    if columns % 2:
        transposed = closed_tour(columns, rows)
        return None if transposed is None else [(row, column) for column, row in transposed]
    # Along the first row, and back down and up the columns below it.
    tour = [(0, column) for column in range(columns)]
    for number, column in enumerate(reversed(range(columns))):
        below = range(1, rows)
        tour += [(row, column) for row in (below if number % 2 == 0 else reversed(below))]
    return tour
