"""What the mask allows, and that no chunk pair is skipped in which it allows something."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.attention.kernels.chunks import ChunkGrid
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels


def labels(values: str) -> jax.Array:
    return jnp.asarray([int(value) for value in values.split()], jnp.int32)[None]


def picture(mask: HopMask) -> list[str]:
    return ["".join("x" if allowed else "." for allowed in row) for row in np.asarray(mask.allowed())[0]]


def test_packed_documents_with_padding():
    """The picture in the module's documentation."""
    tokens = TokenLabels(labels("0 1 2 3 4"), labels("0 0 1 1 -1"))
    assert picture(HopMask(MaskSpec(), tokens, tokens)) == ["x....", "xx...", "..x..", "..xx.", "....."]


def test_a_negative_position_is_an_empty_slot():
    """Also where the mask is not causal: a key-value cache marks its free slots so."""
    query, key = TokenLabels(labels("7")), TokenLabels(labels("0 -1 9"))
    assert picture(HopMask(MaskSpec(causal=False), query, key)) == ["x.x"]
    assert picture(HopMask(MaskSpec(causal=True), query, key)) == ["x.."]


QUERIES, KEYS = 12, 10


@given(
    seed=st.integers(0, 2**31),
    causal=st.booleans(),
    has_positions=st.booleans(),
    has_segments=st.booleans(),
    chunks=st.sampled_from([(1, 1), (4, 3), (5, 10)]),
)
def test_an_unreachable_chunk_pair_allows_nothing(seed, causal, has_positions, has_segments, chunks):
    random = np.random.default_rng(seed)

    def tokens(count: int) -> TokenLabels:
        positions = jnp.asarray(random.integers(-2, 20, (2, count)), jnp.int32)
        segments = jnp.asarray(np.sort(random.integers(-1, 4, (1, count)), axis=1), jnp.int32)
        # A mask has positions where it is causal, and some label in any case.
        keeps_positions = has_positions or causal or not has_segments
        return TokenLabels(positions if keeps_positions else None, segments if has_segments else None)

    mask = HopMask(MaskSpec(causal), tokens(QUERIES), tokens(KEYS))
    *_, reachable = ChunkGrid((2, QUERIES, 1, 4), (2, KEYS, 1, 4), *chunks).split_mask(mask, jnp.zeros(()))
    allowed = np.asarray(mask.allowed()).any(axis=0)
    for row, column in np.argwhere(allowed):
        assert reachable[row // chunks[0], column // chunks[1]]


@pytest.mark.parametrize("keys", [4, 5])
def test_without_labels_only_chunk_padding_is_masked(keys: int):
    mask = HopMask(MaskSpec(causal=False), TokenLabels(), TokenLabels())
    _, key, reachable = ChunkGrid((1, 4, 1, 4), (1, keys, 1, 4), 2, 2).split_mask(mask, jnp.zeros(()))
    assert mask.trivial
    if keys == 4:
        assert reachable is None
    else:
        assert key.positions.tolist() == [[[0, 0]], [[0, 0]], [[0, -1]]]
