"""Orders of a sequence over the ring, and the exchange that brings a sharded sequence into them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.attention import (
    LAYOUTS,
    SCHEDULES,
    attention,
    inverse_order,
    order,
    padded_length,
    reference_attention,
    shard_order,
)
from agentic_ring.attention.kernels.xla import default_chunk
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.layout import STRIPES, from_layout, to_layout
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("contiguous", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("striped", [0, 2, 4, 6, 1, 3, 5, 7]),
        ("block_striped", [0, 1, 4, 5, 2, 3, 6, 7]),
        ("zigzag", [0, 1, 6, 7, 2, 3, 4, 5]),
    ],
)
def test_orders_of_the_documentation(layout, expected):
    assert order(layout, 8, 2).tolist() == expected


@given(
    layout=st.sampled_from(LAYOUTS),
    length=st.integers(1, 9000),
    ring=st.integers(1, 9),
    unit=st.integers(1, 5),
)
def test_orders_are_permutations(layout, length, ring, unit):
    padded = padded_length(length, ring, layout, unit)
    assert 0 <= padded - length < max(2, STRIPES * ring if layout == "block_striped" else 0) * ring * unit
    assert padded % (ring * unit) == 0
    permutation = order(layout, padded, ring)
    assert permutation.dtype == np.int32
    assert sorted(permutation) == list(range(padded))
    assert (permutation[inverse_order(permutation)] == np.arange(padded)).all()
    shards = np.split(permutation, ring)
    for index, shard in enumerate(shards):
        assert (shard_order(layout, padded, ring, index) == shard).all()


@given(ring=st.integers(2, 9), steps=st.integers(1, 400))
def test_units_stay_together(ring, steps):
    for layout in ("contiguous", "block_striped", "zigzag"):
        length = padded_length(4 * steps, ring, layout, unit=4)
        groups = order(layout, length, ring).reshape(-1, 4)
        assert (groups == groups[:, :1] + np.arange(4)).all()
        assert (groups[:, 0] % 4 == 0).all()


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


@pytest.mark.parametrize(("layout", "schedule"), list(zip(LAYOUTS, 2 * SCHEDULES, strict=True)))
def test_attention_takes_a_permuted_sequence_of_the_padded_length(layout, schedule):
    length = padded_length(41, 8, layout, schedule=schedule)
    assert length == (64 if schedule == "bidirectional" else 48)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, length, 2, 8))
    places = order(layout, length, 8)
    options = {"mesh": make_mesh(MeshShape(ring=8)), "strategy": "ring", "schedule": schedule}
    options |= {"layout": layout, "permuted": True}
    got = attention(*(x[:, places] for x in (q, k, v)), **options)
    np.testing.assert_allclose(got, reference_attention(q, k, v)[:, places], rtol=2e-5, atol=2e-6)
    with pytest.raises(ArgumentError, match=f"pad them to {length}"):
        attention(*(x[:, :41] for x in (q, k, v)), **options)


def test_default_chunks_are_even_in_number_and_short():
    for length in (2, 511, 512, 1024, 1025, 4096, 100_000):
        chunk = default_chunk(length)
        assert chunk <= 512
        assert -(-length // chunk) % 2 == 0
    assert default_chunk(1) == 1


def test_a_length_that_does_not_spread_is_refused():
    with pytest.raises(ArgumentError, match=r"12 tokens .* 8 in zigzag .* 16"):
        order("zigzag", 12, 8)
    with pytest.raises(UnknownNameError, match="layout 'spiral'"):
        padded_length(8, 2, "spiral")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="0, 2, 1"):
        padded_length(0, 2, "zigzag")
