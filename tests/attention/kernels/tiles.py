"""Kernels on one tile: random arrays, and the comparison with float64."""

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.kernels.interface import Saved, Tile
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Scores
from tests.attention.oracle import Result, exact, random_arrays

SCALE = 0.2


def arrays(queries, keys, heads=(2, 1), head_dim=32, dtype=jnp.float32, batch=2):
    """q, k, v and the gradient of the output."""
    shapes = (batch, queries, heads[0], head_dim), (batch, keys, heads[1], head_dim)
    return [jnp.asarray(x, dtype) for x in random_arrays(*shapes)]


def unlabelled(spec=MaskSpec(), offset=0):
    return HopMask(spec, TokenLabels(), TokenLabels(), offset)


def written_out(mask, arrays, soft_cap=None) -> Result:
    """Attention to a tile in float64, with the logsumexp."""
    # As ``HopMask.offset`` says; positions below 0 would be padding.
    shifts = max(mask.offset, 0), max(-mask.offset, 0)
    places = tuple(np.arange(x.shape[1])[None] + shift for x, shift in zip(arrays[:2], shifts, strict=True))
    segments = None if mask.query.segment_ids is None else (mask.query.segment_ids, mask.key.segment_ids)
    scores = {"scale": SCALE, "soft_cap": soft_cap}
    return exact(arrays, mask.spec, positions=places, segment_ids=segments, **scores)


def check(kernel, mask, q, k, v, d_output, soft_cap=None, tolerance=2e-5):
    """Forward, and backward from the exact state, in float64; rows without a key exactly 0."""
    scores = Scores(SCALE, soft_cap)
    output, dq, dk, dv, _, logsumexp = written_out(mask, (q, k, v, d_output), soft_cap)
    state = jax.jit(lambda *a: kernel.forward(Tile(*a, mask, scores)))(q, k, v)
    got = jax.jit(lambda q, k, v, *saved: kernel.backward(Tile(q, k, v, mask, scores), Saved.of(*saved)))(
        q, k, v, jnp.asarray(output, jnp.float32), jnp.asarray(logsumexp, jnp.float32), d_output
    )
    assert all(x.dtype == jnp.float32 for x in (*state, *got))
    for actual, wanted in zip((*state, *got), (output, logsumexp, dq, dk, dv), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance * 5)
    empty = np.isneginf(logsumexp)
    assert not np.asarray(state.output)[empty].any()
    assert not np.asarray(got.dq)[empty].any()
