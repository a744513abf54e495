"""Orders of a sequence over the ring, the exchange that brings it into them, and their balance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.attention import LAYOUTS, MaskSpec, inverse_order, order, padded_length, shard_order
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.layout import (
    STRIPES,
    balanced_layout,
    from_layout,
    imbalance,
    tile_counts,
    to_layout,
)
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh


def test_orders_of_the_documentation():
    assert order("striped", 8, 2).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert order("block_striped", 8, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order("zigzag", 8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert padded_length(12, 4, "zigzag", ulysses=2) == 16  # what ``order`` needs on 4 devices


@given(st.sampled_from(LAYOUTS), st.integers(1, 9000), st.integers(1, 9), st.integers(1, 5))
def test_orders_are_permutations(layout, length, ring, unit):
    padded = padded_length(length, ring, layout, unit)
    assert 0 <= padded - length < max(2, STRIPES * ring if layout == "block_striped" else 0) * ring * unit
    assert padded % (ring * unit) == 0
    permutation = order(layout, padded, ring)
    assert permutation.dtype == np.int32
    assert sorted(permutation) == list(range(padded))
    assert (permutation[inverse_order(permutation)] == np.arange(padded)).all()
    for index, shard in enumerate(np.split(permutation, ring)):
        assert (shard_order(layout, padded, ring, index) == shard).all()
    if layout != "striped":
        units = permutation.reshape(-1, unit)
        assert (units == units[:, :1] + np.arange(unit)).all()
        assert (units[:, 0] % unit == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchange_equals_the_order(layout):
    """In both directions, with the order traced from the axis index."""
    mesh, length = make_mesh(MeshShape(ring=8)), 8 * 19 if layout == "striped" else 128
    x = jnp.arange(2 * length * 3).reshape(2, length, 3)
    spec = jax.P(None, "ring")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=(spec, spec, jax.P("ring")))
    def exchange(x):
        axis = RingAxis.over("ring")
        moved = to_layout(x, layout, axis)
        places = shard_order(layout, length, 8, jax.lax.axis_index("ring"))
        return moved, from_layout(moved, layout, axis), jnp.asarray(places)

    moved, back, places = exchange(x)
    expected = order(layout, length, 8)
    np.testing.assert_array_equal(moved, x[:, expected])
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(places, expected)


def test_a_length_that_does_not_spread_is_refused():
    with pytest.raises(ArgumentError, match=r"12 tokens .* 8 in zigzag .* 16"):
        order("zigzag", 12, 8)
    with pytest.raises(UnknownNameError, match="layout 'spiral'"):
        padded_length(8, 2, "spiral")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="0, 2, 1"):
        padded_length(0, 2, "zigzag")


def packed(length: int, median: int) -> np.ndarray:
    """Segment ids [1, length] of documents whose lengths are log-normal about ``median``."""
    lengths = np.random.default_rng(median).lognormal(np.log(median), 1.0, size=10 * length // median)
    return np.repeat(np.arange(len(lengths)), lengths.astype(int) + 16)[None, :length]


def test_zigzag_gives_every_device_the_same_tiles_of_one_causal_sequence():
    counts = tile_counts("zigzag", 4, 256, MaskSpec())
    assert (counts == [[3], [2], [2], [2]]).all()  # of four a hop; all but the diagonal half empty
    assert tile_counts("contiguous", 4, 256, MaskSpec())[1].tolist() == [0, 4, 4, 4]


def test_tiles_are_those_with_anything_to_attend_to():
    """Against the whole mask, written out."""
    length, ring = 4096, 4
    segments = packed(length, 300)
    t = np.arange(length)
    # Most tokens are seen to the end of their 1024 only, as in branches behind what they share.
    hidden_from = np.where(t % 1024 < 400, length, 1024 * (t // 1024 + 1))[None]
    allowed = (t <= t[:, None]) & (segments == segments.T) & (t[:, None] < hidden_from)
    for layout, chunk in (("zigzag", 512), ("block_striped", 128), ("contiguous", 512)):
        places = order(layout, length, ring)
        tiles = allowed[places][:, places].reshape(length // chunk, chunk, -1, chunk).any((1, 3))
        devices = tiles.reshape(ring, -1, ring, length // chunk // ring).sum((1, 3))
        expected = [[devices[d, (d - hop) % ring] for d in range(ring)] for hop in range(ring)]
        assert tile_counts(layout, ring, length, MaskSpec(), segments, hidden_from).tolist() == expected


@pytest.mark.parametrize(("ring", "median"), [(2, 2048), (8, 8192), (8, None)])
def test_stripes_balance_packed_documents(ring: int, median: int | None):
    """With 16K tokens a device; the critical path is at most 1.15 times the ideal."""
    length = 16384 * ring
    segments = None if median is None else packed(length, median)
    assert imbalance(tile_counts("block_striped", ring, length, MaskSpec(), segments)) < 1.15
    if median is not None and ring > 2:
        assert imbalance(tile_counts("zigzag", ring, length, MaskSpec(), segments)) > 1.5


def test_the_layout_that_is_chosen():
    for layout, mask, segments, platform in (
        ("zigzag", MaskSpec(), False, "gpu"),
        ("contiguous", MaskSpec(causal=False), False, "gpu"),
        ("block_striped", MaskSpec(), True, "gpu"),
        ("zigzag", MaskSpec(), True, "tpu"),
        ("block_striped", MaskSpec(prefix=9), False, "gpu"),
        ("contiguous", MaskSpec(window=2049), False, "gpu"),
        ("block_striped", MaskSpec(window=2050), False, "gpu"),
    ):
        assert balanced_layout(mask, segments, 4, 1024, platform) == layout
