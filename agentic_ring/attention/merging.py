"""Attention to several sets of keys, each computed on its own and merged by logsumexp."""

from typing import Any

import jax

from agentic_ring.attention.api import attention
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.softmax import SoftmaxState, merge, state_dtype
from agentic_ring.errors import ArgumentError

_OF_PREFIX = ("mesh", "rules", "scale", "soft_cap", "kernel")
"""Options of ``attention`` that hold for the prefix too."""
_REFUSED = ("alibi_slopes", "head_windows", "dropout_rate", "return_logsumexp")


def merge_attention(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Attention to the union of two disjoint sets of keys, from attention to each.

    Args:
      a, b: (output [B, T, N, V], logsumexp [B, T, N]), as ``attention`` returns them with
        ``return_logsumexp``.

    Returns:
      The same of all keys; the output in the dtype of ``a``'s.
    """
    dtype = a[0].dtype
    output, logsumexp = merge(*(SoftmaxState(x.astype(state_dtype(x.dtype)), total) for x, total in (a, b)))
    return output.astype(dtype), logsumexp


def attention_with_prefix(
    q: jax.Array, k: jax.Array, v: jax.Array, prefix_k: jax.Array, prefix_v: jax.Array, **options: Any
) -> jax.Array:
    """Attention of each row to a prefix that all rows share, stored once, and to the row's own keys.

    The prefix is read once for all rows: their queries are one long row against it.

    Args:
      q, k, v: queries and each row's own keys and values, as in ``attention``.
      prefix_k, prefix_v: keys [S, K, H] and values [S, K, V] that every query attends to.
      **options: further arguments of ``attention``, for the rows' own keys; scale, soft_cap, kernel and mesh
        hold for the prefix too.

    Returns:
      [B, T, N, V] in q's dtype.

    Raises:
      ArgumentError: the prefix does not fit, or an option has no meaning for it.
    """
    for name in _REFUSED:
        if name in options:
            raise ArgumentError(f"{name} was given, but a shared prefix does not take it; leave it out")
    if prefix_k.shape[1:] != k.shape[2:] or prefix_v.shape != (*prefix_k.shape[:2], v.shape[3]):
        raise ArgumentError(
            f"prefix_k has shape {prefix_k.shape} and prefix_v {prefix_v.shape}; expected [S, K, H] and "
            f"[S, K, V] with (K, H) = {k.shape[2:]} and V = {v.shape[3]}"
        )
    own = attention(q, k, v, return_logsumexp=True, **options)
    batch, length, heads, head_dim = q.shape
    output, logsumexp = attention(
        q.reshape(1, batch * length, heads, head_dim),
        prefix_k[None],
        prefix_v[None],
        mask=MaskSpec(causal=False),
        return_logsumexp=True,
        **{name: options[name] for name in _OF_PREFIX if name in options},
    )
    prefix = output.reshape(batch, length, heads, -1), logsumexp.reshape(batch, length, heads)
    return merge_attention((own[0], own[1]), prefix)[0]
