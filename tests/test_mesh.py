"""Where arrays lie: every device holds its share of a weight, and rings of TPU chips follow links.

Pods are described: no compiler of theirs is needed.
"""

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from agentic_ring.errors import MeshError
from agentic_ring.mesh import (
    AXES,
    MeshShape,
    ShardingRules,
    make_mesh,
    mesh_on_first_devices,
    rings,
    rows_per_shard,
    shape_with_ring,
)

RULES = ShardingRules()


def shares(shape, axes, **sizes) -> int:
    """Parts that a weight is cut into on a mesh of these sizes."""
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
    spec = RULES.sharding(mesh, shape, axes).spec
    # Shapes that do not divide, and axes named twice, are refused.
    return prod(shape) // prod(jax.NamedSharding(mesh, spec).shard_shape(shape))


def test_a_width_that_does_not_divide_goes_over_two_dimensions():
    for shape, axes in (
        ((3200, 8640), ("embed", "ffn")),
        ((3200, 32, 100), ("embed", "heads", None)),
        ((32, 100, 3200), ("heads", None, "embed")),
        ((32000, 3200), ("vocab", "embed")),
        ((26, 3200, 8640), ("embed", "ffn")),
    ):
        assert shares(shape, axes, fsdp=4, ring=128) == shares(shape, axes, fsdp=128, ring=4) == 512


def test_a_width_that_divides_stays_on_one_dimension():
    mesh = AbstractMesh((1, 1, 2, 4, 1), AXES)
    assert RULES.sharding(mesh, (64, 96), ("embed", "ffn")).spec[0] == ("fsdp", "ring")
    # The layers of a stack are scanned, so only stages cut them, even where nothing else can be.
    assert RULES.sharding(mesh, (8, 3, 5), ("embed", "ffn")).spec == PartitionSpec("stage", None, "tensor")
    # Tensor-parallel heads keep their axis; axes that divide nothing are left out.
    assert shares((3200, 32, 100), ("embed", "heads", None), fsdp=4, ring=64, tensor=2) == 512
    assert shares((7, 5), ("embed", "ffn"), ring=8) == 1


def test_shapes_of_meshes():
    assert mesh_on_first_devices(MeshShape(ring=2)).devices.flatten().tolist() == jax.devices()[:2]
    staged = mesh_on_first_devices(MeshShape(stage=2, data=2, ring=2))
    assert staged.shape == {"stage": 1, "data": 4, "fsdp": 1, "ring": 2, "tensor": 1}
    assert rows_per_shard(6, make_mesh(MeshShape(data=2, ring=4))) == 3
    assert shape_with_ring(None, 8) == MeshShape(ring=8)
    assert shape_with_ring(None, 8, stages=4) == MeshShape(stage=4, ring=2)
    assert shape_with_ring(2, 8, stages=2) == MeshShape(2, 1, 2, 1, 2)


def test_what_cannot_be():
    for call, named in (
        (lambda: mesh_on_first_devices(MeshShape(ring=16)), "needs 16 devices, but there are 8"),
        (lambda: make_mesh(MeshShape(fsdp=0)), "fsdp is 0"),
        (lambda: make_mesh(MeshShape(data=3)), "needs 6 devices, but there are 8"),
        (lambda: RULES.spec("depth"), "'depth'"),
        (lambda: RULES.spec("embed", "sequence"), "on two dimensions"),
        (lambda: rows_per_shard(6, make_mesh(MeshShape(data=2, fsdp=2, ring=2))), r"a ring of 4 or 8$"),
        (lambda: rows_per_shard(3, make_mesh(MeshShape(stage=2, ring=4))), r"fewer stages$"),
        (lambda: shape_with_ring(None, 8, stages=3), r"3 stages .* 1, 2, 4, 8"),
        (lambda: shape_with_ring(8, 8, stages=2), r"ring of 8 .* 4 devices of a stage; .* 1, 2"),
    ):
        with pytest.raises(MeshError, match=named):
            call()


@dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that are used."""

    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"


def pod(columns: int, rows: int) -> list[Chip]:
    return [Chip((x, y, 0)) for y in range(rows) for x in range(columns)]


def steps(ring) -> list[int]:
    """The number of links of each hop of a ring, including that from the last chip to the first."""
    places = np.array([chip.coords for chip in ring])
    return np.abs(places - np.roll(places, -1, axis=0)).sum(axis=1).tolist()


def test_every_ring_steps_along_links():
    whole = [(2, 2, 1), (2, 3, 1), (3, 2, 1), (5, 4, 1), (4, 5, 1), (16, 16, 1)]
    for columns, rows, count in (*whole, (16, 16, 4), (4, 8, 4)):
        found = rings(pod(columns, rows), count)
        assert found.shape == (count, rows * columns // count)
        assert set(found.reshape(-1)) == set(pod(columns, rows))
        assert {step for ring in found for step in steps(ring)} == {1}
    for count in (1, 2):
        for ring in make_mesh(MeshShape(fsdp=count), pod(4, 4)).devices.reshape(count, -1):
            assert set(steps(ring)) == {1}
    # Cores of a chip follow one another.
    (ring,) = rings([Chip(chip.coords, core) for core in range(2) for chip in pod(4, 4)], 1)
    assert [chip.core_on_chip for chip in ring] == [0, 1] * 16
    assert set(steps(ring)) == {0, 1}


def test_other_devices_are_left_to_jax():
    for case, devices in {
        "odd": pod(3, 3),
        "one row": pod(1, 3),
        "no rectangle": pod(4, 4)[:-1],
        "not flat": [Chip((x, 0, z)) for x in range(2) for z in range(2)],
        "cores are missing": [*pod(2, 2), Chip((0, 0, 0), 1)],
        "GPUs": [SimpleNamespace(coords=chip.coords) for chip in pod(2, 2)],
        "CPUs": jax.devices(),
    }.items():
        assert rings(devices, 1) is None, case
    assert rings(pod(4, 4), 3) is None, "does not divide"
