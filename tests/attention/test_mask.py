"""What the mask allows, and that no chunk pair is skipped in which it allows something."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import hidden_outside
from agentic_ring.attention.kernels.xla import ChunkGrid
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels


def labels(values: str) -> jax.Array:
    return jnp.asarray([int(value) for value in values.split()], jnp.int32)[None]


def allowed(mask: HopMask) -> np.ndarray:
    return np.asarray(mask.allowed())[0]


def picture(mask: HopMask) -> list[str]:
    return ["".join("x" if attends else "." for attends in row) for row in allowed(mask)]


def test_packed_documents_with_padding():
    """The picture in the module's documentation."""
    tokens = TokenLabels(labels("0 1 2 3 4"), labels("0 0 1 1 -1"))
    assert picture(HopMask(MaskSpec(), tokens, tokens)) == ["x....", "xx...", "..x..", "..xx.", "....."]


def test_a_negative_position_is_an_empty_slot():
    """Also where the mask is not causal: a key-value cache marks its free slots so."""
    query, key = TokenLabels(labels("7")), TokenLabels(labels("0 -1 9"))
    assert picture(HopMask(MaskSpec(causal=False), query, key)) == ["x.x"]
    assert picture(HopMask(MaskSpec(causal=True), query, key)) == ["x.."]


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (MaskSpec(window=2), "x.... xx... .xx.. ..xx. ...xx"),
        (MaskSpec(window=2, prefix=1), "x.... xx... xxx.. x.xx. x..xx"),
        (MaskSpec(prefix=3), "xxx.. xxx.. xxx.. xxxx. xxxxx"),
        (MaskSpec(causal=False, window=2), "xx... xxx.. .xxx. ..xxx ...xx"),
    ],
)
def test_window_and_prefix(spec, rows):
    tokens = TokenLabels(labels("0 1 2 3 4"))
    assert picture(HopMask(spec, tokens, tokens)) == rows.split()


def test_prefixes_of_different_lengths_by_equal_positions():
    """What MaskSpec.prefix advises for a batch of prefix-LM rows."""
    tokens = TokenLabels(labels("0 0 1 2"))
    assert picture(HopMask(MaskSpec(), tokens, tokens)) == ["xx..", "xx..", "xxx.", "xxxx"]


@pytest.mark.parametrize("offset", [-2, 0, 3])
def test_an_offset_places_queries_after_keys(offset: int):
    mask = HopMask(MaskSpec(window=3), TokenLabels(), TokenLabels(), offset).placed(4, 5)
    want = [["x" if 0 <= t + offset - s < 3 else "." for s in range(5)] for t in range(4)]
    assert picture(mask) == ["".join(row) for row in want]


QUERIES, KEYS = 12, 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("labels", ["positions", "segments", "both", "hidden"])
def test_chunk_pairs_are_skipped_only_where_nothing_attends(labels, seed):
    """And of chunks of one token all are."""
    random = np.random.default_rng(seed)

    def tokens(count: int, hidden: bool = False) -> TokenLabels:
        positions = jnp.asarray(random.integers(-2, 20, (2, count)), jnp.int32)
        segments = jnp.asarray(np.sort(random.integers(-1, 4, (1, count)), axis=1), jnp.int32)
        ranges = tuple(jnp.asarray(random.integers(0, 20, (2, 2, 2, count)), jnp.int32))
        return TokenLabels(
            None if labels == "segments" else positions,
            segments if labels in ("segments", "both") else None,
            tuple((first, end) for first, end in ranges) if hidden else None,
        )

    query, key = tokens(QUERIES), tokens(KEYS, labels == "hidden")
    for causal, window, prefix in itertools.product((True, False), (None, 1, 4), (0, 3)):
        mask = HopMask(MaskSpec(causal, window, prefix), query, key)
        if mask.spec.by_position and labels == "segments":
            continue
        attends = np.asarray(mask.allowed())
        for chunks in ((1, 1), (4, 3)):
            grid = ChunkGrid((2, QUERIES, 4, 4), (2, KEYS, 2, 4), *chunks)
            _, reachable = grid.split_mask(mask, jnp.zeros(()))
            assert reachable is not None
            for row, column in np.argwhere(attends.any(axis=0)):
                assert reachable[row // chunks[0], column // chunks[1]]
            if chunks == (1, 1):
                np.testing.assert_array_equal(reachable, attends.any(axis=0))


@pytest.mark.parametrize("keys", [4, 5])
def test_without_labels_only_chunk_padding_is_masked(keys: int):
    mask = HopMask(MaskSpec(causal=False), TokenLabels(), TokenLabels())
    split, reachable = ChunkGrid((1, 4, 1, 4), (1, keys, 1, 4), 2, 2).split_mask(mask, jnp.zeros(()))
    assert mask.trivial
    if keys == 4:
        assert reachable is None
    else:
        assert split.key.segment_ids is not None
        assert split.key.segment_ids[:, 0].tolist() == [[0, 0], [0, 0], [0, -1]]


T = 24
T_ROW, S_COLUMN = np.arange(T)[:, None], np.arange(T)[None]
CAUSAL = S_COLUMN <= T_ROW
STARTS = np.repeat([0, 7, 8, 19], [7, 1, 11, 5])  # of the document of each token
ENDS = np.repeat([7, 8, 19, 24], [7, 1, 11, 5])
IN_PREFIX = np.arange(T) < STARTS + 3
SUBTREE = np.array([24, 9, 5, 4, 5, 9, 7, 8, 9, *range(16, 17), *[16] * 6, *range(17, 25)])


def with_hidden_rows(spec: MaskSpec, hidden_rows: np.ndarray) -> HopMask:
    positions = jnp.arange(len(hidden_rows))[None]
    ranges = jnp.asarray(hidden_rows).reshape(1, len(hidden_rows), -1, 2)
    hidden = tuple((ranges[:, :, i, 0], ranges[:, :, i, 1]) for i in range(ranges.shape[2]))
    return HopMask(spec, TokenLabels(positions), TokenLabels(positions, hidden=hidden))


PATTERNS = {
    "packed documents": (True, 0, ENDS, CAUSAL & (STARTS[:, None] == STARTS)),
    "documents, each a prefix-LM": (
        False,
        np.where(IN_PREFIX, STARTS, np.arange(T)),
        ENDS,
        (STARTS[:, None] == STARTS) & (CAUSAL | IN_PREFIX),
    ),
    "one question, many answers": (
        True,
        0,
        np.where(np.arange(T) < 7, T, ENDS),
        CAUSAL & ((S_COLUMN < 7) | (STARTS[:, None] == STARTS)),
    ),
    "tree": (True, 0, SUBTREE, CAUSAL & (T_ROW < SUBTREE)),
    "window and global tokens": (
        True,
        0,
        np.where(np.arange(T) % 9 == 0, T, np.arange(T) + 4),
        CAUSAL & ((S_COLUMN % 9 == 0) | (T_ROW - S_COLUMN < 4)),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_the_documentation(name: str):
    causal, first, end, expected = PATTERNS[name]
    hidden = np.asarray(hidden_outside(first, end))
    assert (allowed(with_hidden_rows(MaskSpec(causal), hidden)) == expected).all()
