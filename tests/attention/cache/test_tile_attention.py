"""Prefill on a hardware kernel: it takes what it serves and is right, and the XLA kernel takes the rest.

The kernel is Splash in Pallas' interpreter, given to the CPU. Whichever kernel must not run returns NaN.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

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
from agentic_ring.mesh import MeshShape
from tests.attention.cache.sequences import CAUSAL, compile_step, counted, follow
from tests.attention.kernels.tiles import arrays, unlabelled
from tests.attention.oracle import exact


@pytest.fixture
def on_hardware(monkeypatch) -> Callable:
    """Gives the CPU a hardware kernel; the arguments say which kernels are right, of "splash" and "xla"."""

    def give(*right: str) -> None:
        kernels = {"splash": SplashKernel(interpret=True), "xla": XlaKernel()}
        nan = partial(jax.tree.map, lambda x: x * jnp.nan)
        for name in kernels.keys() - right:
            real = kernels[name].forward
            kernels[name] = SimpleNamespace(forward=lambda tile, real=real: nan(real(tile)))
        monkeypatch.setitem(registry._ORDER, "cpu", ("splash", "xla"))
        monkeypatch.setitem(registry._KERNELS, "splash", lambda: kernels["splash"])
        monkeypatch.setattr(shard_attention, "select_kernel", lambda name: kernels["xla"])

    return give


def prefill(ring: int, positions: np.ndarray, first: int, kernel="auto", **options) -> None:
    """Compares a second chunk, of the columns from ``first`` on, with the truth."""
    # Anew, as the kernels differ from test to test.
    step = compile_step(partial(attend_chunk, kernel=kernel), append_blocks)
    steps = [(compile_step(lambda *_: None, append_blocks), first), (step, positions.shape[1] - first)]
    follow(MeshShape(ring=ring), positions, steps, tolerance=5e-6, **options)


@pytest.mark.parametrize(
    ("ring", "heads", "prefix"),
    [
        (1, (2, 1), 0),
        (2, (4, 1), 0),
        pytest.param(2, (2, 2), 0, marks=pytest.mark.slow),
        pytest.param(2, (8, 1), 512, marks=pytest.mark.slow),
    ],
)
def test_rows_of_different_lengths_run_the_hardware_kernel(on_hardware, ring, heads, prefix):
    on_hardware("splash")
    chunk = 128 * ring
    # One row goes on to the end, one ends in the second chunk, one within the first.
    positions = counted([2 * chunk, chunk + 70, 50], 2 * chunk, start=prefix)
    prefill(ring, positions, chunk, heads=heads, prefix=prefix)


@pytest.mark.parametrize(
    ("rows", "mask", "chunk", "ring", "kernel"),
    [
        ("out of order", CAUSAL, 128, 1, "auto"),
        ("holes", CAUSAL, 128, 1, "auto"),
        ("whole", MaskSpec(window=40), 128, 1, "auto"),
        ("whole", CAUSAL, 100, 1, "auto"),
        ("whole", CAUSAL, 128, 1, "xla"),
        pytest.param("holes", CAUSAL, 128, 2, "auto", marks=pytest.mark.slow),
    ],
)
def test_what_it_does_not_serve_runs_the_xla_kernel(on_hardware, rows, mask, chunk, ring, kernel):
    # On a ring some blocks are simple all the same.
    on_hardware(*(("xla",) if ring == 1 else ("xla", "splash")))
    first = chunk * ring
    positions = counted([2 * first] * 2, 2 * first)
    if rows == "out of order":  # cached tokens come after some of the chunk
        positions[0, first - 1 : first + 3] = first, first - 1, first + 2, first + 1
    if rows == "holes":  # padding before the tokens, in the cache and in the chunk
        positions[1, [*range(5), *range(first, first + 5)]] = EMPTY_SLOT
    prefill(ring, positions, first, kernel, mask=mask, heads=(2, 1))


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
    for found, want in ((state.output, expected.output), (state.logsumexp, expected.logsumexp)):
        np.testing.assert_allclose(found, want, atol=2e-6)
