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

from agentic_ring.attention.cache import EMPTY_SLOT, append_blocks, shard_attention
from agentic_ring.attention.cache.cached_attention import attend_chunk
from agentic_ring.attention.kernels import registry
from agentic_ring.attention.kernels.interface import Tile
from agentic_ring.attention.kernels.splash import SplashKernel
from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape
from tests.attention.cache.sequences import CAUSAL, RULES, compile_step, counted, follow
from tests.attention.kernels.tiles import arrays, unlabelled
from tests.attention.oracle import exact


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
        monkeypatch.setattr(shard_attention, "select_kernel", lambda name: xla)

    return give


def store_only(cache, query, key, value, positions, mask, prefix):
    return None, jax.jit(partial(append_blocks, rules=RULES))(cache, key[None], value[None], positions)


def prefill(ring: int, positions: np.ndarray, first: int, kernel="auto", **options) -> None:
    """Compares a second chunk, of the columns from ``first`` on, with the truth."""
    # Anew, as the kernels differ from test to test.
    step = compile_step(partial(attend_chunk, kernel=kernel), append_blocks)
    steps = [(store_only, first), (step, positions.shape[1] - first)]
    follow(MeshShape(ring=ring), positions, steps, tolerance=5e-6, **options)


@pytest.mark.parametrize(
    ("ring", "heads"), [(1, (2, 1)), (2, (8, 1)), pytest.param(2, (2, 2), marks=pytest.mark.slow)]
)
def test_rows_of_different_lengths_run_the_hardware_kernel(on_hardware, ring, heads):
    on_hardware("splash")
    chunk = 128 * ring
    # One row goes on to the end, one ends in the second chunk, one within the first.
    positions = counted([2 * chunk, chunk + 70, 50], 2 * chunk)
    prefill(ring, positions, chunk, heads=heads)


@pytest.mark.slow
def test_a_shared_prefix_runs_the_hardware_kernel(on_hardware):
    on_hardware("splash")
    positions = counted([512, 260], 512, start=512)
    prefill(2, positions, 256, heads=(8, 1), prefix=512)


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
    ("make", "mask", "chunk", "ring", "kernel"),
    [
        (between, CAUSAL, 128, 1, "auto"),
        (with_holes, CAUSAL, 128, 1, "auto"),
        (whole_rows, MaskSpec(window=40), 128, 1, "auto"),
        (whole_rows, CAUSAL, 100, 1, "auto"),
        (whole_rows, CAUSAL, 128, 1, "xla"),
        pytest.param(with_holes, CAUSAL, 128, 2, "auto", marks=pytest.mark.slow),
    ],
    ids=["out of order", "holes", "window", "100 tokens", "asked for", "holes, ring"],
)
def test_what_it_does_not_serve_runs_the_xla_kernel(on_hardware, make, mask, chunk, ring, kernel):
    # On a ring some blocks are simple all the same.
    on_hardware(*(("xla",) if ring == 1 else ("xla", "splash")))
    prefill(ring, make(chunk * ring, 2 * chunk * ring), chunk * ring, kernel, mask=mask, heads=(2, 1))


def test_a_kernel_of_another_platform_is_refused():
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
    given, lengths, places = arrays(128, 256, batch=3), np.array([256, 77, 0]), np.arange(256)
    mask = replace(unlabelled(spec), key_lengths=jnp.array(lengths))
    state = jax.jit(kernel.forward)(Tile(*given[:3], mask, Scores(0.3)))
    positions = places[None, :128], np.where(places < lengths[:, None], places, EMPTY_SLOT)
    expected = exact(given, spec, positions=positions, scale=0.3)
    np.testing.assert_allclose(state.output, expected.output, atol=2e-6)
    np.testing.assert_allclose(state.logsumexp, expected.logsumexp, atol=2e-6)
