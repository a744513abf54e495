"""Prefill on a hardware kernel: it takes what it serves and is right, and the XLA kernel takes the rest.

The kernel is Splash in Pallas' interpreter, given to the CPU. Whichever kernel must not run returns NaN.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention.cache import (
    EMPTY_SLOT,
    CachedAttentionInputs,
    KVCache,
    append_blocks,
    slots_needed,
    tile_attention,
)
from agentic_ring.attention.cache.chunked_prefill import attend_chunk, ring_moves_less
from agentic_ring.attention.cache.storage import store_like
from agentic_ring.attention.kernels import registry
from agentic_ring.attention.kernels.interface import Tile
from agentic_ring.attention.kernels.splash import SplashKernel
from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.cache.sequences import CAUSAL, RULES, compile_step, make_cache, oracle, tokens
from tests.attention.kernels.tiles import arrays, unlabelled


class Wrong:
    """A kernel whose results no one may use."""

    def __init__(self, kernel):
        self.kernel = kernel

    def forward(self, tile: Tile):
        return jax.tree.map(lambda x: x * jnp.nan, self.kernel.forward(tile))


@pytest.fixture
def on_hardware(monkeypatch) -> Callable:
    """Gives the CPU a hardware kernel; the arguments say which kernels are right, of "splash" and "xla"."""

    def give(*right: str) -> None:
        splash, xla = SplashKernel(interpret=True), XlaKernel()
        splash, xla = splash if "splash" in right else Wrong(splash), xla if "xla" in right else Wrong(xla)
        monkeypatch.setitem(registry._ORDER, "cpu", ("splash", "xla"))
        monkeypatch.setitem(registry._KERNELS, "splash", lambda: splash)
        monkeypatch.setattr(tile_attention, "select_kernel", lambda name: xla)

    return give


def prefill(ring: int, positions: np.ndarray, first: int, heads=(2, 1), mask=CAUSAL, prefix=0, kernel="auto"):
    """Output and truth of a second chunk, of the columns from ``first`` on, after the others in the cache.

    The first ``prefix`` tokens of all rows are the same and lie in a cache of their own.
    """
    rows, length = positions.shape
    query, key, value = tokens(rows, prefix + length, heads=heads)
    key[:, :prefix], value[:, :prefix] = key[:1, :prefix], value[:1, :prefix]
    places = np.concatenate([np.tile(np.arange(prefix), (rows, 1)), positions], axis=1)
    expected = oracle(query, key, value, places, mask)[:, prefix + first :]
    past, new = slice(prefix, prefix + first), slice(prefix + first, None)
    with jax.set_mesh(mesh_on_first_devices(MeshShape(ring=ring))):
        cache = make_cache(rows, slots_needed(first, 0, 1, ring), ring, key_heads=heads[1])
        stored = (key[None, :, past], value[None, :, past], positions[:, :first])
        cache = jax.jit(partial(append_blocks, rules=RULES))(cache, *stored)
        shared = None
        if prefix:
            shared = make_cache(1, prefix, ring, key_heads=heads[1])
            kept = (jnp.asarray(x[:1, :prefix]).swapaxes(1, 2) for x in (key, value))
            kept = ((store_like(x, shared.keys[0]),) for x in kept)
            shared = KVCache(*kept, jnp.arange(prefix)[None], shared.filled, shared.calls)
        step = compile_step(
            partial(attend_chunk, kernel=kernel), append_blocks
        )  # anew, as the kernels differ from test to test
        arguments = (cache, query[:, new], key[:, new], value[:, new], positions[:, first:])
        moves = ring_moves_less(
            CachedAttentionInputs(*arguments[1:], cache.layer(0), shared and shared.layer(0))
        )
        output, _ = step(*arguments, mask=mask, prefix=shared)
    return output, expected, moves


def counted(lengths: list[int], columns: int, start: int = 0) -> np.ndarray:
    """Positions from ``start`` on in rows of these lengths, and padding after them."""
    place = np.arange(columns)
    return np.where(place < np.array(lengths)[:, None], start + place, EMPTY_SLOT).astype(np.int32)


@pytest.mark.parametrize(
    ("ring", "heads", "goes_round"),
    [(1, (2, 1), False), (2, (8, 1), True), pytest.param(2, (2, 2), False, marks=pytest.mark.slow)],
)
def test_rows_of_different_lengths_run_the_hardware_kernel(on_hardware, ring, heads, goes_round):
    on_hardware("splash")
    chunk = 128 * ring
    # One row goes on to the end, one ends in the second chunk, one within the first.
    positions = counted([2 * chunk, chunk + 70, 50], 2 * chunk)
    output, expected, moves = prefill(ring, positions, chunk, heads)
    np.testing.assert_allclose(output, expected, atol=5e-6)
    assert moves == goes_round


@pytest.mark.slow
def test_a_shared_prefix_runs_the_hardware_kernel(on_hardware):
    on_hardware("splash")
    positions = counted([512, 260], 512, start=512)
    output, expected, _ = prefill(2, positions, 256, (8, 1), prefix=512)
    np.testing.assert_allclose(output, expected, atol=5e-6)


def between(first: int, columns: int) -> np.ndarray:
    """Cached tokens that come after some of the chunk, and a chunk out of order."""
    places = np.arange(columns)
    places[[first - 1, first]] = places[[first, first - 1]]
    places[[first + 2, first + 1]] = places[[first + 1, first + 2]]
    return np.stack([places, np.arange(columns)]).astype(np.int32)


def with_holes(first: int, columns: int) -> np.ndarray:
    """Rows with padding before their tokens, in the cache and in the chunk."""
    positions = np.tile(np.arange(columns), (2, 1))
    positions[1, [*range(5), *range(first, first + 5)]] = EMPTY_SLOT
    return positions.astype(np.int32)


def whole_rows(first: int, columns: int) -> np.ndarray:
    """Rows without padding."""
    return counted([columns] * 2, columns)


@pytest.mark.parametrize(
    ("make", "mask", "chunk", "ring"),
    [
        (between, CAUSAL, 128, 1),
        (with_holes, CAUSAL, 128, 1),
        (whole_rows, MaskSpec(window=40), 128, 1),
        (whole_rows, CAUSAL, 100, 1),
        pytest.param(with_holes, CAUSAL, 128, 2, marks=pytest.mark.slow),
    ],
    ids=["out of order", "holes", "window", "100 tokens", "holes, ring"],
)
def test_what_it_does_not_serve_runs_the_xla_kernel(on_hardware, make, mask, chunk, ring):
    # On a ring some blocks are simple all the same.
    on_hardware(*(("xla",) if ring == 1 else ("xla", "splash")))
    output, expected, _ = prefill(ring, make(chunk * ring, 2 * chunk * ring), chunk * ring, mask=mask)
    np.testing.assert_allclose(output, expected, atol=5e-6)


def test_the_xla_kernel_can_be_asked_for(on_hardware):
    on_hardware("xla")
    output, expected, _ = prefill(1, whole_rows(128, 256), 128, kernel="xla")
    np.testing.assert_allclose(output, expected, atol=5e-6)
    with pytest.raises(ArgumentError, match="'cudnn'"):
        prefill(1, whole_rows(128, 256), 128, kernel="cudnn")


@pytest.mark.parametrize(
    ("kernel", "spec"),
    [
        (XlaKernel(), CAUSAL),
        (VanillaKernel(), MaskSpec(causal=False)),
        (SplashKernel(interpret=True), CAUSAL),
        (SplashKernel(interpret=True), MaskSpec(causal=False)),
    ],
)
def test_keys_beyond_their_length_are_not_there(kernel, spec):
    q, k, v, _ = arrays(128, 256, batch=3)
    mask, scores, lengths = unlabelled(spec), Scores(0.3), [256, 77, 0]
    padded = Tile(q, k, v, replace(mask, key_lengths=jnp.array(lengths)), scores)
    state = jax.jit(kernel.forward)(padded)
    for row, length in enumerate(lengths[:2]):
        alone = Tile(q[row][None], k[row][None, :length], v[row][None, :length], mask, scores)
        expected = VanillaKernel().forward(alone)
        np.testing.assert_allclose(state.output[row], expected.output[0], atol=2e-6)
        np.testing.assert_allclose(state.logsumexp[row], expected.logsumexp[0], atol=2e-6)
    assert not np.any(state.output[2])
    assert np.isneginf(state.logsumexp[2]).all()
