"""The TPU kernels in Pallas' interpreter, tile by tile, against float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import attention
from agentic_ring.attention.kernels import registry, splash
from agentic_ring.attention.kernels.interface import Saved, Tile, merge
from agentic_ring.attention.kernels.splash import SplashKernel, _BandTile
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Scores
from agentic_ring.mesh import MeshShape, make_mesh
from tests.attention.kernels.tiles import SCALE, arrays, check, unlabelled, written_out

KERNEL = SplashKernel(interpret=True)


@pytest.mark.parametrize(
    ("spec", "offset", "heads", "soft_cap"),
    [
        (MaskSpec(causal=False), 0, (2, 1), None),
        (MaskSpec(), -70, (3, 1), 2.0),  # the first 70 queries attend to nothing
        (MaskSpec(window=150), 200, (2, 1), None),
        (MaskSpec(causal=False, window=90), -40, (2, 1), None),
    ],
)
def test_masks(spec, offset, heads, soft_cap):
    query = key = TokenLabels()
    if spec.window is None:
        ids = np.sort(np.random.default_rng(1).integers(0, 3, (2, 384)), axis=1)
        ids[0, -60:] = -1
        ids[1, :5] = -1
        query, key = TokenLabels(None, jnp.asarray(ids[:, :256])), TokenLabels(None, jnp.asarray(ids))
    check(KERNEL, HopMask(spec, query, key, offset), *arrays(256, 384, heads), soft_cap=soft_cap)


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        (512, 1024, unlabelled()),
        (1024, 512, unlabelled(offset=-600)),
        pytest.param(1536, 2048, unlabelled(MaskSpec(window=700), 512), marks=pytest.mark.slow),
    ],
    ids=["no query", "no key", "several of each size"],
)
def test_blocks_without_a_pair(queries, keys, mask):
    check(KERNEL, mask, *arrays(queries, keys, batch=1))


def test_bfloat16():
    check(KERNEL, unlabelled(), *arrays(256, 256, dtype=jnp.bfloat16), tolerance=8e-3)


def test_two_tiles_make_the_whole():
    """A backward with the state over all keys, as a ring calls it; the second tile has empty rows."""
    q, k, v, d_output = arrays(256, 512)
    expected = written_out(unlabelled(offset=100), (q, k, v, d_output))
    tiles = [
        Tile(q, k[:, part], v[:, part], unlabelled(offset=100 - part.start), Scores(SCALE))
        for part in (slice(0, 256), slice(256, 512))
    ]

    @jax.jit
    def run(tiles, d_output):
        state = merge(*map(KERNEL.forward, tiles))
        return state, [KERNEL.backward(tile, Saved.of(*state, d_output)) for tile in tiles]

    state, ((dq, *first), (more_dq, *second)) = run(tiles, d_output)
    joined = [np.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)]
    for actual, wanted in zip(state, (expected.output, expected.logsumexp), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    for actual, wanted in zip((dq + more_dq, *joined), expected[1:4], strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-4)


def test_some_heads_after_the_others(monkeypatch):
    monkeypatch.setattr(splash, "PART_BYTES", 1)
    assert splash._parts(512, 8, 4) == 4
    assert splash._parts(512, 4, 4) == 2  # two heads each
    assert splash._parts(512, 3, 1) == splash._parts(512, 1, 1) == 1
    ids = TokenLabels(None, jnp.asarray(np.arange(256)[None] // 100 - 1))
    check(KERNEL, HopMask(MaskSpec(), ids, ids), *arrays(256, 256, heads=(4, 2)))


def test_within_rematerialised_layers(monkeypatch):
    """Which are traced twice, and the second time with the check of varying axes on."""
    # By a name that a CPU takes.
    monkeypatch.setitem(registry._KERNELS, "vanilla", lambda: KERNEL)
    monkeypatch.setattr(splash, "PART_BYTES", 1)
    q, k, v, d_output = arrays(512, 512, heads=(4, 2))
    mesh = make_mesh(MeshShape(ring=2), jax.devices()[:2])

    def loss(q):
        layer = jax.checkpoint(lambda q: attention(q, k, v, strategy="ring", kernel="vanilla"))
        return jnp.sum(layer(q) * d_output)

    with jax.set_mesh(mesh):
        jax.jit(jax.grad(loss)).trace(q)


def test_the_blocks_visited_are_those_with_a_pair():
    """Against the mask of every pair, for bands that begin and end anywhere."""
    distance = np.arange(256)[:, None] - np.arange(384)[None]
    for band in itertools.product((-300, -128, -1, 0, 7), (7, 60, 127, 128, 200)):
        tile = _BandTile(256, 384, 64, band)
        inside = (distance >= band[0]) & (distance <= band[1])
        assert (tile.query_block, tile.key_block) == (256, 128)
        np.testing.assert_array_equal(tile.visited(band), inside.reshape(1, 256, 3, 128).any((1, 3)))
