"""Rings of TPU chips follow links, on described pods without their compiler."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.torus import closed_tour, rings


@dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that are used."""

    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"


def pod(columns: int, rows: int) -> list[Chip]:
    return [Chip((x, y, 0)) for y in range(rows) for x in range(columns)]


def steps(ring) -> list[int]:
    """Returns the number of links of each hop of a ring, including that from the last chip to the first."""
    places = np.array([chip.coords for chip in ring])
    return np.abs(places - np.roll(places, -1, axis=0)).sum(axis=1).tolist()


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (4, 4), (5, 4), (4, 5), (8, 16), (16, 16)])
def test_a_tour_visits_every_place_once_and_closes(shape):
    tour = closed_tour(*shape)
    assert sorted(tour) == [(row, column) for row in range(shape[0]) for column in range(shape[1])]
    assert set(steps([Chip((x, y, 0)) for y, x in tour])) == {1}


@pytest.mark.parametrize("shape", [(1, 3), (4, 1), (3, 3), (5, 5)])
def test_where_there_is_no_tour_none_is_given(shape):
    assert closed_tour(*shape) is None


@pytest.mark.parametrize(
    ("columns", "rows", "count"), [(16, 16, 1), (8, 4, 1), (16, 16, 2), (16, 16, 4), (16, 16, 16), (4, 8, 4)]
)
def test_every_ring_steps_along_links(columns, rows, count):
    found = rings(pod(columns, rows), count)
    assert found.shape == (count, rows * columns // count)
    assert set(found.reshape(-1)) == set(pod(columns, rows))
    for ring in found:
        assert set(steps(ring)) == {1}


def test_row_by_row_some_hops_would_be_long():
    assert max(steps(pod(16, 16))) > 16


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        (pod(3, 3), 1),
        (pod(4, 4)[:-1], 1),
        (pod(4, 4), 3),
        ([Chip((x, 0, z)) for x in range(2) for z in range(2)], 1),
        ([Chip((x, y, 0), core) for x in range(2) for y in range(2) for core in range(2)][1:], 1),
    ],
    ids=["odd", "not a rectangle", "does not divide", "not flat", "a core is missing"],
)
def test_other_devices_are_left_to_jax(devices, count):
    assert rings(devices, count) is None


def test_cores_of_a_chip_follow_one_another():
    cores = [Chip(chip.coords, core) for core in range(2) for chip in pod(4, 4)]
    (ring,) = rings(cores, 1)
    assert len(ring) == 32
    assert [chip.core_on_chip for chip in ring] == [0, 1] * 16
    assert sorted(set(steps(ring))) == [0, 1]


def test_devices_without_places_are_left_to_jax():
    assert rings(jax.devices(), 1) is None


def test_devices_without_cores_are_left_to_jax():
    @dataclass(frozen=True)
    class AbsentGpu:
        coords: tuple[int, int, int]

    assert rings([AbsentGpu((x, 0, 0)) for x in range(4)], 1) is None


def test_a_mesh_takes_its_rings_from_the_tour():
    devices = pod(4, 4)
    ring = make_mesh(MeshShape(), devices).devices.reshape(-1)
    assert set(steps(ring)) == {1}
    for row in make_mesh(MeshShape(fsdp=2), devices).devices.reshape(2, 8):
        assert set(steps(row)) == {1}
