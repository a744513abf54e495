"""Dropout: the right share, independent bits, the same wherever they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.attention.mask import HopMask, TokenLabels
from agentic_ring.attention.scores import Dropout
from agentic_ring.mesh import MeshShape, make_mesh
from tests.attention.oracle import exact, random_arrays

RATE = 0.3
ROWS, HEADS, TOKENS = 2, 3, 256
factors_of = jax.jit(Dropout.factors)


def kept(seed: int = 0, first_row: int = 0, segment: int = 0) -> np.ndarray:
    """bool [B, N, T, S]."""
    dropout = Dropout.from_key(RATE, jax.random.key(seed), jnp.int32(first_row), jnp.int32(0))
    assert dropout is not None
    tokens = TokenLabels(jnp.arange(TOKENS)[None], jnp.full((1, TOKENS), segment))
    mask = HopMask(MaskSpec(), tokens, tokens)
    factors = np.asarray(factors_of(dropout, mask, jnp.arange(ROWS), jnp.arange(HEADS)[None]))
    assert set(np.unique(factors)) == {np.float32(0), np.float32(1 / (1 - RATE))}
    return factors > 0


def test_the_share_is_the_rate_in_every_row_and_column():
    bits = kept()
    assert abs(bits.mean() - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / bits.size)
    for axis in (2, 3):
        shares = bits.mean(axis=axis)
        # The means of independent bits have this spread, neither more nor (a pattern) less.
        assert shares.std() == pytest.approx(np.sqrt(RATE * (1 - RATE) / TOKENS), rel=0.15)


def test_bits_of_rows_heads_seeds_segments_and_neighbours_are_independent():
    bits = kept()
    np.testing.assert_array_equal(bits[1], kept(first_row=1)[0], "a row has its number in the whole batch")
    pairs = {
        "heads": (bits[0, 0], bits[0, 1]),
        "rows": (bits[0, 0], bits[1, 0]),
        "seeds": (bits[0, 0], kept(seed=1)[0, 0]),
        "segments": (bits[0, 0], kept(segment=1)[0, 0]),
        "queries": (bits[0, 0, 1:], bits[0, 0, :-1]),
        "keys": (bits[0, 0, :, 1:], bits[0, 0, :, :-1]),
        "transposed": (bits[0, 0], bits[0, 0].T),
    }
    for name, (a, b) in pairs.items():
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < (10 if name == "transposed" else 5) / TOKENS, name
    # Three corners of a rectangle would give the fourth, were the bit that of hash(query) xor hash(key).
    signs = np.where(bits[0, 0], 1.0, -1.0)
    signs -= signs.mean()
    corners = signs[:-1, :-1] * signs[1:, :-1] * signs[:-1, 1:] * signs[1:, 1:]
    assert abs(corners.mean()) < 5 * corners.std() / np.sqrt(corners.size)


def test_the_same_on_any_mesh_strategy_layout_and_kernel():
    arrays = random_arrays((4, 64, 8, 8), (4, 64, 8, 8))
    options = {"dropout_rate": RATE, "dropout_key": jax.random.key(7)}
    want = exact(arrays, **options).output
    assert np.abs(want - exact(arrays).output).max() > 0.1
    for shape, how in (
        (MeshShape(data=2, ring=4), {"strategy": "ulysses_ring", "layout": "striped"}),
        (MeshShape(ring=2, tensor=4), {"strategy": "ring", "layout": "zigzag", "kernel": "vanilla"}),
    ):
        got = attention(*arrays[:3], mesh=make_mesh(shape), **how, **options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
