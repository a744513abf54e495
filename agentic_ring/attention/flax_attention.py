"""Ring attention for modules of Flax that take an ``attention_fn``.

    nnx.MultiHeadAttention(..., attention_fn=attention_fn)(x, is_causal=True)
    causal = functools.partial(attention_fn, spec=MaskSpec(causal=True))
    linen.MultiHeadDotProductAttention(..., attention_fn=causal)(x)

Nothing here imports Flax: the function takes what both modules pass (flax 0.12).
"""

from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.attention.api import attention
from agentic_ring.attention.inputs import Pair
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.errors import ArgumentError


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
    *,
    spec: MaskSpec | None = None,
    segment_ids: Pair = None,
    positions: Pair = None,
    **options: Any,
) -> jax.Array:
    """``attention`` under the mesh of ``jax.set_mesh``, with the arguments of Flax's attention functions.

    Causal only where the call (``is_causal``) or ``spec`` says so, as in Flax.

    Args:
      query: [..., T, N, H], any number of batch axes, which are made one.
      key, value: [..., S, K, H], N a multiple of K.
      bias, mask: refused, as arrays of T x S numbers; see ``spec`` and ``segment_ids``.
      broadcast_dropout: makes no difference: every row and every head drops its own.
      dropout_rng, dropout_rate: as ``dropout_key`` and ``dropout_rate`` of ``attention``.
      deterministic: whether to drop nothing.
      dtype: dtype of the computation and the result; by default that to which the three arrays promote.
      precision: refused, because the backward would not follow it; ``jax.default_matmul_precision``
        around the whole step sets both.
      module, qk_attn_weights_einsum, attn_weights_value_einsum: refused: the kernel keeps no weights.
      force_fp32_for_softmax: makes no difference: the softmax is always in float32.
      is_causal: whether tokens attend only to earlier ones and themselves; ``spec``, if given, must agree.
      input_positions: refused: Flax passes them for a rotation of queries and keys.
      spec: the mask; None is ``MaskSpec(causal=is_causal)``.
      segment_ids, positions: int [..., T], or a (query, key) pair; see ``attention``.
      **options: further arguments of ``attention``.

    Returns:
      [..., T, N, H] in ``dtype``.

    Raises:
      ArgumentError: an argument that is refused, or that does not fit the others.
    """
    del broadcast_dropout, force_fp32_for_softmax
    _refuse_mask(query, bias, mask)
    by_name = "choose a kernel by its name instead"
    rotate = (
        "rotate queries and keys in an attention_fn of your own that calls this one; positions for the mask "
        "are functools.partial(attention_fn, positions=...)"
    )
    for name, given, advice in (
        ("precision", precision, "wrap the step in jax.default_matmul_precision(...)"),
        ("module", module, "attention weights are never kept; leave sow_weights out"),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum, by_name),
        ("attn_weights_value_einsum", attn_weights_value_einsum, by_name),
        ("input_positions", input_positions, rotate),
    ):
        if given is not None:
            raise ArgumentError(f"{name} was passed to attention_fn, which cannot use it; {advice}")
    for name, x in (("key", key), ("value", value)):
        if x.shape[:-3] != query.shape[:-3]:
            raise ArgumentError(f"{name} has shape {x.shape} but query {query.shape}; batches must be equal")
    if spec is None:
        spec = MaskSpec(causal=is_causal)
    elif is_causal and not spec.causal:
        raise ArgumentError(f"is_causal is True but spec is {spec}; leave out is_causal, or make it causal")
    if spec.causal and positions is None and query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        raise ArgumentError(
            f"the mask is causal, but query has {query.shape[-3]} tokens and key has {key.shape[-3]}; "
            "leave out is_causal and give spec=MaskSpec(causal=False) for cross-attention"
        )
    rate = 0.0 if deterministic else dropout_rate
    if rate and dropout_rng is None:
        raise ArgumentError(
            f"dropout_rate is {rate} but there is no dropout_rng; pass the module its dropout rngs, or "
            "deterministic=True"
        )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    q, k, v = (_one_batch_axis(x, kept=3).astype(dtype) for x in (query, key, value))
    segment_ids, positions = jax.tree.map(lambda x: _one_batch_axis(x, kept=1), (segment_ids, positions))
    options |= {"segment_ids": segment_ids, "positions": positions}
    options |= {"dropout_rate": rate, "dropout_key": dropout_rng if rate else None}
    return attention(q, k, v, mask=spec, **options).reshape(query.shape)


def _refuse_mask(query: jax.Array, bias: jax.Array | None, mask: jax.Array | None) -> None:
    if bias is not None:
        raise ArgumentError(f"bias is an array of shape {bias.shape}; ring attention adds none to its scores")
    if mask is None:
        return
    advice = (
        "ring attention takes a MaskSpec: functools.partial(attention_fn, spec=MaskSpec(causal=True)) (or "
        "is_causal=True in the call of an nnx module), and for packed or padded sequences "
        "functools.partial(attention_fn, segment_ids=ids)"
    )
    if query.ndim > 2 and query.shape[-3] == 1:
        # One query and a mask is what a module with decode=True calls with.
        advice = (
            "Flax's own cache (decode=True) needs one; decode with agentic_ring.attention.cache, or "
            "give the decoding module Flax's attention function"
        )
    raise ArgumentError(f"mask is an array of shape {mask.shape}; {advice}")


def _one_batch_axis(x: jax.Array, kept: int) -> jax.Array:
    """[..., the last ``kept`` axes] -> [B, the same]; arrays with too few axes are left to the checks."""
    return x if x.ndim < kept else x.reshape(-1, *x.shape[x.ndim - kept :])
