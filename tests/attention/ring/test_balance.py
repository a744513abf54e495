"""Tiles that each device of a ring computes, by layout and mask, and the layout that is chosen."""

import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, order
from agentic_ring.attention.ring.layout import balanced_layout, imbalance, tile_counts

CAUSAL = MaskSpec()


def packed(length: int, median: int) -> np.ndarray:
    """Segment ids [1, length] of documents whose lengths are log-normal about ``median``."""
    lengths = np.random.default_rng(median).lognormal(np.log(median), 1.0, size=10 * length // median)
    return np.repeat(np.arange(len(lengths)), lengths.astype(int) + 16)[None, :length]


def test_zigzag_gives_every_device_the_same_tiles_of_one_causal_sequence():
    counts = tile_counts("zigzag", 4, 256, CAUSAL)
    assert (counts == [[3], [2], [2], [2]]).all()  # of four a hop; all but the diagonal half empty
    assert tile_counts("contiguous", 4, 256, CAUSAL)[1].tolist() == [0, 4, 4, 4]


def test_tiles_are_those_with_anything_to_attend_to():
    """Against the whole mask, written out."""
    length, ring = 4096, 4
    segments = packed(length, 300)
    t = np.arange(length)
    allowed = (t <= t[:, None]) & (segments == segments.T)
    for layout, chunk in (("zigzag", 512), ("block_striped", 128), ("contiguous", 512)):
        places = order(layout, length, ring)
        tiles = allowed[places][:, places].reshape(length // chunk, chunk, -1, chunk).any((1, 3))
        devices = tiles.reshape(ring, -1, ring, length // chunk // ring).sum((1, 3))
        expected = [[devices[d, (d - hop) % ring] for d in range(ring)] for hop in range(ring)]
        assert tile_counts(layout, ring, length, CAUSAL, segments).tolist() == expected


@pytest.mark.parametrize(("ring", "median"), [(2, 2048), (8, 8192), (8, None)])
def test_stripes_balance_packed_documents(ring: int, median: int | None):
    """With 16K tokens a device; the critical path is at most 1.15 times the ideal."""
    length = 16384 * ring
    segments = None if median is None else packed(length, median)
    assert imbalance(tile_counts("block_striped", ring, length, CAUSAL, segments)) < 1.15
    if median is not None and ring > 2:
        assert imbalance(tile_counts("zigzag", ring, length, CAUSAL, segments)) > 1.5


def test_the_layout_that_is_chosen():
    def chosen(mask: MaskSpec, segments: bool = False, platform: str = "gpu") -> str:
        return balanced_layout(mask, segments, 4, 1024, platform)

    assert chosen(CAUSAL) == "zigzag"
    assert chosen(MaskSpec(causal=False)) == "contiguous"
    assert chosen(CAUSAL, segments=True) == "block_striped"
    assert chosen(CAUSAL, segments=True, platform="tpu") == "zigzag"
    assert chosen(MaskSpec(prefix=9)) == "block_striped"
    assert chosen(MaskSpec(window=2049)) == "contiguous"
    assert chosen(MaskSpec(window=2050)) == "block_striped"
