"""Bugs that users of ring attention met in other packages: this one does not have them.

Each docstring names the thread and the symptom; docs/notebook.md says what each test reports where the bug is
planted here, and experiments/results/attention_known_bugs.csv what it gives for `ringattention` 0.1.2.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.oracle import differentiated, errors, exact, random_arrays

PADDING = -1
LENGTH, RING, TILE = 64, 4, 8


def row(tokens: int = LENGTH, heads: int = 2) -> list[np.ndarray]:
    return random_arrays((1, tokens, heads, 8), (1, tokens, heads, 8), seed=tokens)


@cache
def attend_on(ring=RING, strategy="ring") -> partial:
    return partial(attention, mesh=mesh_on_first_devices(MeshShape(ring=ring)), strategy=strategy)


def assert_exact(arrays, ring=RING, strategy="ring", **options) -> None:
    result = differentiated(attend_on(ring, strategy), arrays, **options)
    assert max(errors(result, exact(arrays, **options)).values()) < 1e-5


def test_packing_ignored_or_bound_to_the_ring():
    """axolotl-ai-cloud/axolotl#3608: queries attended across the bounds of documents.

    zhuzilin/ring-flash-attention#51: the length of every packed document had to be a multiple of the ring.
    Here is one of a single token, and a row that does not divide either.
    """
    assert_exact(row(53), segment_ids=np.repeat(np.arange(4), [13, 1, 22, 17])[None])


def test_stale_keys_and_local_logsumexp_in_the_backward():
    """huggingface/diffusers#14265: the backward read the device's own keys and values at every hop.

    tenstorrent/tt-metal#53205: each hop's backward used that hop's own output and logsumexp. dQ and dK were
    off; the output and dV were exact, so only comparing dQ and dK shows it.
    """
    assert_exact(row())


def test_merge_overflows():
    """zhuzilin/ring-flash-attention#30, jzhang38/EasyContext#14: blocks were merged with log(1 + exp(x)).

    It is infinite in float32 once the logsumexps of two blocks lie 89 apart, and training gave NaN. Scores of
    the four blocks lie 250 to 750 apart here; those up to 500 are themselves rounded to 3e-5.
    """
    q, k, *others = row()
    levels = np.repeat(np.array([0, 250, -250, 500], np.float32), LENGTH // RING)[:, None, None]
    arrays = [np.full_like(q, 8**-0.25), k + levels * 8**-0.25, *others]
    assert errors(differentiated(attend_on(), arrays), exact(arrays))["output"] < 1e-4


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_sinks_or_window_dropped(strategy):
    """PrimeIntellect-ai/prime-rl#3397, #2828: what replaced the model's attention dropped sinks and window.

    In pytorch/torchtitan#2211 the sinks were merged by a wrong formula. Here on a ring, and where heads are
    exchanged, so that a device needs the sinks of its heads.
    """
    options = {"sinks": np.array([1, -1, 0.5, 2], np.float32), "mask": MaskSpec(window=9)}
    assert_exact(row(heads=4), strategy=strategy, **options)


def test_error_grows_with_the_ring():
    """zhuzilin/ring-flash-attention#42, OpenRLHF/OpenRLHF#801: each hop rounds its result to bfloat16."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in row()]
    expected = exact(arrays)[:4]

    def deviations(ring: int) -> np.ndarray:
        pairs = zip(differentiated(attend_on(ring), arrays)[:4], expected, strict=True)
        return np.array([np.linalg.norm(np.asarray(got, np.float64) - want) for got, want in pairs])

    assert (deviations(8) / deviations(1)).max() < 1.1


def test_document_lengths_rounded_down():
    """NVIDIA/TransformerEngine#1930: of 7 tokens on a ring of 2, with padding, the last was left out."""
    assert_exact(row(10), ring=2, segment_ids=np.repeat([0, 1, PADDING], [4, 3, 3])[None])


def test_odd_ring_sizes():
    """ByteDance-Seed/VeOmni#1085: sends were paired by even and odd places; the ring hung."""
    assert_exact(row(60), ring=3)


def test_decoding_on_a_ring():
    """erfanzar/EasyDeL#120: ring attention fails in generation, where there is one query per sequence."""
    q, k, v, d_output = row()
    positions = jnp.array([[LENGTH - 1]]), jnp.arange(LENGTH)[None]
    assert_exact([q[:, -1:], k, v, d_output[:, -1:]], positions=positions)


def test_reruns_differ():
    """SandAI-org/MagiAttention#65: sums in an order that changes from run to run."""
    first, second = (differentiated(attend_on(), row()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_empty_rows_leak():
    """Found in `ringattention` 0.1.2: masks are a finite number, so a row without keys weighs all alike."""
    segments = jnp.where(jnp.arange(LENGTH) < 11, PADDING, 0)[None]
    assert not np.asarray(attend_on()(*row()[:3], segment_ids=segments))[0, :11].any()


def test_dropout_repeats_over_devices_or_differs_in_the_backward():
    """NVIDIA/Fuser#3123: shards need different random bits. In `ringattention` 0.1.2 devices drop alike.

    zhuzilin/ring-flash-attention#36: the backward did not get the random state of the forward. Queries are 0
    here, and values and gradients unit vectors: row t of the output and column t of dv are what dropout left
    of the equal probabilities of query t.
    """
    tokens = RING * TILE
    zeros = np.zeros((1, tokens, 1, tokens), np.float32)
    unit = np.eye(tokens, dtype=np.float32)[None, :, None]
    options = {"mask": MaskSpec(causal=False), "dropout_rate": 0.5, "dropout_key": jax.random.key(7)}
    result = differentiated(attend_on(), [zeros, zeros, unit, unit], **options)
    kept = np.asarray(result.output[0, :, 0]) > 0
    tiles = kept.reshape(RING, TILE, RING, TILE).swapaxes(1, 2).reshape(RING**2, -1)
    assert len(np.unique(tiles, axis=0)) == RING**2
    np.testing.assert_array_equal(kept, np.asarray(result.dv[0, :, 0]).T > 0)
