"""Kernels on one tile: random arrays, their float64 truth, and the comparison."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention.kernels.interface import Saved, Tile
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Scores

SCALE = 0.2


def arrays(queries, keys, heads=(2, 1), head_dim=32, dtype=jnp.float32, batch=2, seed=0):
    """q, k, v and the gradient of the output."""
    generator = np.random.default_rng(seed)
    shapes = [(batch, queries, heads[0], head_dim), *[(batch, keys, heads[1], head_dim)] * 2]
    return [jnp.asarray(generator.normal(size=s), dtype) for s in (*shapes, shapes[0])]


def unlabelled(spec=MaskSpec(), offset=0):
    """A mask without positions and segment ids."""
    return HopMask(spec, TokenLabels(), TokenLabels(), offset)


def truth(q, k, v, d_output, allowed, soft_cap=None):
    """Softmax attention in float64: state and gradients; ``allowed`` is bool [B, T, S]."""
    q, k, v, d_output = (np.asarray(x, np.float64) for x in (q, k, v, d_output))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    raw = np.einsum("btnh,bsnh->bnts", q, k) * SCALE
    scores = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    scores = np.where(allowed[:, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        logsumexp = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - np.where(np.isneginf(logsumexp), 0, logsumexp)[..., None])
    output = np.einsum("bnts,bsnh->btnh", weights, v)
    delta = (output * d_output).sum(-1).transpose(0, 2, 1)
    d_scores = weights * (np.einsum("btnh,bsnh->bnts", d_output, v) - delta[..., None]) * SCALE
    if soft_cap is not None:
        d_scores *= 1 - np.tanh(raw / soft_cap) ** 2

    def of_group(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)

    dq = np.einsum("bnts,bsnh->btnh", d_scores, k)
    dk = of_group(np.einsum("bnts,btnh->bsnh", d_scores, q))
    dv = of_group(np.einsum("bnts,btnh->bsnh", weights, d_output))
    return output, logsumexp.transpose(0, 2, 1), dq, dk, dv


def allowed_pairs(mask, batch, queries, keys):
    """The mask as bool [B, T, S]."""
    allowed = np.ones((1, queries, keys), bool)
    if not mask.trivial:
        allowed = np.asarray(mask.placed(queries, keys).allowed())
    return np.broadcast_to(allowed, (batch, queries, keys))


def check(kernel, mask, q, k, v, d_output, soft_cap=None, tolerance=2e-5):
    """Forward, and backward from the exact state, against ``truth``; rows without a key exactly 0."""
    scores = Scores(SCALE, soft_cap)
    allowed = allowed_pairs(mask, q.shape[0], q.shape[1], k.shape[1])
    output, logsumexp, *gradients = truth(q, k, v, d_output, allowed, soft_cap)
    state = jax.jit(lambda *a: kernel.forward(Tile(*a, mask, scores)))(q, k, v)
    got = jax.jit(lambda q, k, v, *saved: kernel.backward(Tile(q, k, v, mask, scores), Saved.of(*saved)))(
        q, k, v, jnp.asarray(output, jnp.float32), jnp.asarray(logsumexp, jnp.float32), d_output
    )
    assert all(x.dtype == jnp.float32 for x in (*state, *got))
    for actual, wanted in zip((*state, *got), (output, logsumexp, *gradients), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance * 5)
    empty = ~allowed.any(-1)
    assert not np.asarray(state.output)[empty].any()
    assert np.isneginf(np.asarray(state.logsumexp)[empty]).all()
    assert not np.asarray(got.dq)[empty].any()


def check_refusal(kernel, arrays, mask, scores, message):
    """Neither direction computes the tile, and the error says why."""
    q, k, v, d_output = arrays
    tile = Tile(q, k, v, mask, scores)
    with pytest.raises(NotImplementedError, match=message):
        kernel.forward(tile)
    with pytest.raises(NotImplementedError, match=message):
        kernel.backward(tile, Saved.of(q, q[..., 0], d_output))
