"""Attention through the whole score matrix: the "vanilla" baseline of arXiv 2310.01889, Table 3.

Memory grows with T x S. It is there to show what the other kernels save, and to check them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.interface import Gradients, Saved, SoftmaxState, Tile, accumulate
from agentic_ring.attention.mask import HopMask
from agentic_ring.attention.scores import Scores


@dataclass(frozen=True)
class VanillaKernel:
    """See ``Kernel``; serves every case whose score matrix fits."""

    def forward(self, tile: Tile) -> SoftmaxState:
        q, k, v, mask, scores = tile
        mask = mask.placed(q.shape[1], k.shape[1])
        masked = _masked(scores.from_products(_products(q, k)), mask, scores)
        largest = masked.max(axis=-1, keepdims=True)
        largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
        weights = jnp.exp(masked - largest)
        total = weights.sum(axis=-1, keepdims=True)
        probabilities = _drop(weights / jnp.where(total == 0.0, 1.0, total), mask, scores)
        output = accumulate("bkgts,bskh->btkgh", probabilities.astype(v.dtype), v)
        logsumexp = (largest + jnp.log(total))[..., 0].transpose(0, 3, 1, 2)
        return SoftmaxState(output.reshape(*q.shape[:3], -1), logsumexp.reshape(q.shape[:3]))

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        q, k, v, mask, scores = tile
        mask = mask.placed(q.shape[1], k.shape[1])
        rows = (saved.total, saved.delta)
        total, delta = (_grouped(row, k).transpose(0, 2, 3, 1)[..., None] for row in rows)
        query, d_output = _grouped(q, k), _grouped(saved.d_output.astype(q.dtype), k)
        unmasked = scores.from_products(_products(q, k))
        probabilities = jnp.exp(_masked(unmasked, mask, scores) - total)
        d_probabilities = _drop(accumulate("btkgh,bskh->bkgts", d_output, v), mask, scores)
        d_products = scores.gradient(probabilities * (d_probabilities - delta), unmasked).astype(q.dtype)
        return Gradients(
            dq=accumulate("bkgts,bskh->btkgh", d_products, k).reshape(q.shape),
            dk=accumulate("bkgts,btkgh->bskh", d_products, query),
            dv=accumulate("bkgts,btkgh->bskh", _drop(probabilities, mask, scores).astype(q.dtype), d_output),
        )


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """[B, T, N, ...] -> [B, T, K, N / K, ...]: the query heads that share a key head."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:])


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    return accumulate("btkgh,bskh->bkgts", _grouped(q, k), k)


def _masked(products: jax.Array, mask: HopMask, scores: Scores) -> jax.Array:
    """Scores [B, K, N / K, T, S], with what is added by head, and -inf where a query does not attend."""
    if mask.trivial:
        return products
    terms = scores.head_terms(mask, jnp.arange(products.shape[1] * products.shape[2])[None])
    if terms is not None:
        products += terms.reshape(-1, *products.shape[1:]).astype(products.dtype)
    return jnp.where(mask.allowed()[:, None, None], products, -jnp.inf)


def _drop(x: jax.Array, mask: HopMask, scores: Scores) -> jax.Array:
    """``x`` [B, K, N / K, T, S] with what dropout does to probabilities."""
    if scores.dropout is None:
        return x
    batch, key_heads, group = x.shape[:3]
    heads = jnp.arange(key_heads * group)[None]
    return x * scores.dropout.factors(mask, jnp.arange(batch), heads).reshape(x.shape)
