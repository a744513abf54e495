"""What the mask allows, and that no chunk pair is skipped in which it allows something."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import hidden_outside
from agentic_ring.attention.kernels.xla import ChunkGrid
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels


def tokens(*values: int, segments: list[int] | None = None) -> TokenLabels:
    return TokenLabels(jnp.array([values]), None if segments is None else jnp.array([segments]))


FIVE = tokens(0, 1, 2, 3, 4)
PACKED = tokens(0, 1, 2, 3, 4, segments=[0, 0, 1, 1, -1])  # the picture in the module's documentation
PREFIXED = tokens(0, 0, 1, 2)  # what MaskSpec.prefix advises for a batch of prefix-LM rows
ONE, SLOTS = tokens(7), tokens(0, -1, 9)  # a key-value cache marks its free slots so


@pytest.mark.parametrize(
    ("spec", "query", "key", "rows"),
    [
        (MaskSpec(), PACKED, PACKED, "x.... xx... ..x.. ..xx. ....."),
        (MaskSpec(causal=False), ONE, SLOTS, "x.x"),
        (MaskSpec(causal=True), ONE, SLOTS, "x.."),
        (MaskSpec(window=2), FIVE, FIVE, "x.... xx... .xx.. ..xx. ...xx"),
        (MaskSpec(window=2, prefix=1), FIVE, FIVE, "x.... xx... xxx.. x.xx. x..xx"),
        (MaskSpec(prefix=3), FIVE, FIVE, "xxx.. xxx.. xxx.. xxxx. xxxxx"),
        (MaskSpec(causal=False, window=2), FIVE, FIVE, "xx... xxx.. .xxx. ..xxx ...xx"),
        (MaskSpec(), PREFIXED, PREFIXED, "xx.. xx.. xxx. xxxx"),
    ],
)
def test_window_and_prefix(spec, query, key, rows):
    (allowed,) = np.asarray(HopMask(spec, query, key).allowed())
    assert " ".join("".join(".x"[int(attends)] for attends in row) for row in allowed) == rows


QUERIES, KEYS = 12, 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("labels", ["positions", "segments", "both", "hidden"])
def test_chunk_pairs_are_skipped_only_where_nothing_attends(labels, seed):
    """And of chunks of one token all are."""
    random = np.random.default_rng(seed)

    def tokens(count: int, hidden: bool = False) -> TokenLabels:
        positions = jnp.asarray(random.integers(-2, 20, (2, count)))
        segments = jnp.asarray(np.sort(random.integers(-1, 4, (1, count)), axis=1))
        ranges = jnp.asarray(random.integers(0, 20, (2, 2, 2, count)))
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
            padded = np.pad(attends.any(axis=0), ((0, 0), (0, -KEYS % chunks[1])))
            parts = padded.reshape(QUERIES // chunks[0], chunks[0], -1, chunks[1])
            assert not (parts.any((1, 3)) & ~np.asarray(reachable)).any()
            if chunks == (1, 1):
                np.testing.assert_array_equal(reachable, attends.any(axis=0))


def test_without_labels_nothing_is_masked():
    mask = HopMask(MaskSpec(causal=False), TokenLabels(), TokenLabels())
    assert ChunkGrid((1, 4, 1, 4), (1, 4, 1, 4), 2, 2).split_mask(mask, jnp.zeros(())) == (mask, None)


T = 24
PLACE = np.arange(T)
STARTS = np.repeat([0, 7, 8, 19], [7, 1, 11, 5])  # of the document of each token
ENDS = np.repeat([7, 8, 19, 24], [7, 1, 11, 5])
SUBTREE = np.array([24, 9, 5, 4, 5, 9, 7, 8, 9, *range(16, 17), *[16] * 6, *range(17, 25)])
CAUSAL, SAME, NEAR = PLACE[:, None] >= PLACE, STARTS[:, None] == STARTS, PLACE[:, None] - PLACE < 4
PREFIX, GLOBAL = PLACE < STARTS + 3, PLACE % 9 == 0

PATTERNS = {
    "packed documents": (True, 0, ENDS, CAUSAL & SAME),
    "prefix-LMs": (False, np.where(PREFIX, STARTS, PLACE), ENDS, SAME & (CAUSAL | PREFIX)),
    "one question, many answers": (True, 0, np.where(PLACE < 7, T, ENDS), CAUSAL & ((PLACE < 7) | SAME)),
    "tree": (True, 0, SUBTREE, CAUSAL & (PLACE[:, None] < SUBTREE)),
    "window and global tokens": (True, 0, np.where(GLOBAL, T, PLACE + 4), CAUSAL & (GLOBAL | NEAR)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_the_documentation(name: str):
    causal, first, end, expected = PATTERNS[name]
    bounds = jnp.moveaxis(hidden_outside(first, end), -1, 0)[:, None]
    key = TokenLabels(jnp.arange(T)[None], hidden=tuple(zip(bounds[::2], bounds[1::2], strict=True)))
    assert (HopMask(MaskSpec(causal), tokens(*range(T)), key).allowed()[0] == expected).all()
