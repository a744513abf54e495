"""Attention through the whole score matrix: the "vanilla" baseline of arXiv 2310.01889, Table 3.

Memory grows with T x S. It is there to show what the other kernels save, and to check them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.interface import Gradients, accumulate, backward_rows
from agentic_ring.attention.mask import HopMask
from agentic_ring.attention.softmax import SoftmaxState


@dataclass(frozen=True)
class VanillaKernel:
    """See ``Kernel``; serves every case whose score matrix fits."""

    def forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: HopMask, *, scale: float
    ) -> SoftmaxState:
        """See ``Kernel.forward``."""
        scores = _scores(q, k, mask, scale)
        largest = scores.max(axis=-1, keepdims=True)
        largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        probabilities = weights / jnp.where(total == 0.0, 1.0, total)
        output = accumulate("bkgts,bskh->btkgh", probabilities.astype(v.dtype), v)
        logsumexp = (largest + jnp.log(total))[..., 0].transpose(0, 3, 1, 2)
        return SoftmaxState(output.reshape(q.shape), logsumexp.reshape(q.shape[:3]))

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        output: jax.Array,
        logsumexp: jax.Array,
        d_output: jax.Array,
        mask: HopMask,
        *,
        scale: float,
    ) -> Gradients:
        """See ``Kernel.backward``."""
        rows = backward_rows(output, logsumexp, d_output)
        total, delta = (_grouped(row, k).transpose(0, 2, 3, 1)[..., None] for row in rows)
        query, d_output = _grouped(q, k), _grouped(d_output.astype(q.dtype), k)
        probabilities = jnp.exp(_scores(q, k, mask, scale) - total)
        d_probabilities = accumulate("btkgh,bskh->bkgts", d_output, v)
        d_scores = (probabilities * (d_probabilities - delta) * scale).astype(q.dtype)
        return Gradients(
            dq=accumulate("bkgts,bskh->btkgh", d_scores, k).reshape(q.shape),
            dk=accumulate("bkgts,btkgh->bskh", d_scores, query),
            dv=accumulate("bkgts,btkgh->bskh", probabilities.astype(q.dtype), d_output),
        )


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """[B, T, N, ...] -> [B, T, K, N / K, ...]: the query heads that share a key head."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:])


def _scores(q: jax.Array, k: jax.Array, mask: HopMask, scale: float) -> jax.Array:
    scores = accumulate("btkgh,bskh->bkgts", _grouped(q, k), k) * scale
    return scores if mask.trivial else jnp.where(mask.allowed()[:, None, None], scores, -jnp.inf)
