"""Plain softmax attention: the oracle that every kernel and strategy is compared with."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from agentic_ring.attention.inputs import Pair, split_arguments
from agentic_ring.attention.mask import HopMask, MaskSpec
from agentic_ring.attention.scores import Dropout


def reference_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: MaskSpec = MaskSpec(),
    positions: Pair = None,
    segment_ids: Pair = None,
    hidden_rows: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    head_windows: Sequence[int | None] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_logsumexp: bool = False,
) -> jax.Array:
    """``attention`` by the whole score matrix, differentiated by JAX, on one device, with its arguments.

    Computes in float64 where the inputs are float64 (under ``jax.enable_x64``), else in float32. Which
    probabilities are dropped follows the same hash of positions.

    Returns:
      [B, T, N, V] in the dtype of the computation. A row with nothing to attend to is exactly 0, and so are
      its gradients. With ``return_logsumexp`` that and the logsumexp [B, T, N], -inf in such a row.
    """
    if positions is None:
        positions = jnp.arange(q.shape[1])[None], jnp.arange(k.shape[1])[None]
    _, inputs = split_arguments(locals())
    batch, queries, heads, head_dim = q.shape
    key_heads = k.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.astype(dtype).reshape(batch, queries, key_heads, heads // key_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k.astype(dtype))
    scores *= head_dim**-0.5 if scale is None else scale

    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)

    hop = HopMask(mask, inputs.query, inputs.key)
    allowed = hop.allowed()[:, None, None]
    distance = jnp.abs(inputs.query.positions[:, :, None] - inputs.key.positions[:, None])[:, None, None]
    if alibi_slopes is not None:
        scores -= alibi_slopes.astype(dtype).reshape(key_heads, -1, 1, 1) * distance
    if inputs.windows is not None:
        allowed = allowed & (distance < inputs.windows.reshape(key_heads, -1, 1, 1))
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf, where=allowed))
    # The inner `where` keeps masked scores out of exp: a derivative of inf times 0 would be NaN.
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - largest, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(dtype).reshape(key_heads, -1, 1, 1)
        total += jnp.exp(sink - jnp.where(jnp.isneginf(largest), 0.0, largest))
    probabilities = weights / jnp.where(total == 0.0, 1.0, total)
    dropout = Dropout.from_key(dropout_rate, dropout_key, jnp.int32(0), jnp.int32(0))
    if dropout is not None:
        factors = dropout.factors(hop, jnp.arange(batch), jnp.arange(heads)[None])
        probabilities *= factors.reshape(probabilities.shape)
    output = jnp.einsum("bkgts,bskh->btkgh", probabilities, v.astype(dtype)).reshape(*q.shape[:3], -1)
    if not return_logsumexp:
        return output
    empty, offset = total == 0.0, jnp.where(jnp.isneginf(largest), 0.0, largest)
    logsumexp = jnp.where(empty, -jnp.inf, offset + jnp.log(jnp.where(empty, 1.0, total)))
    logsumexp = logsumexp[..., 0].transpose(0, 3, 1, 2).reshape(q.shape[:3])
    return output, logsumexp  # pyright: ignore[reportReturnType]
