"""Checks of the arguments that all attention functions share, and their one normal form."""

import jax
import jax.numpy as jnp

from agentic_ring.attention.mask import MaskSpec
from agentic_ring.errors import ArgumentError

Pair = jax.Array | tuple[jax.Array, jax.Array] | None
"""Labels of the tokens: one array for self-attention, a (query, key) pair, or none."""


ArrayLike = jax.Array | jax.ShapeDtypeStruct
"""An array, or what has its shape and dtype."""


def check_arrays(q: ArrayLike, k: ArrayLike, v: ArrayLike) -> None:
    """Checks shapes and dtypes of queries, keys and values.

    Raises:
      ArgumentError: names the argument, what it is and what was expected.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            expected = "[B, T, N, H]" if name == "q" else "[B, S, K, H]"
            raise ArgumentError(f"{name} has shape {x.shape}; expected four axes {expected}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ArgumentError(f"{name} has dtype {x.dtype}; expected a floating-point dtype")
        if x.dtype != q.dtype:
            raise ArgumentError(f"{name} has dtype {x.dtype} but q has {q.dtype}; cast them to one dtype")
        if 0 in x.shape:
            raise ArgumentError(f"{name} has shape {x.shape}; no axis may be empty")
    if k.shape != v.shape:
        raise ArgumentError(f"k has shape {k.shape} but v has {v.shape}; they must be equal")
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(f"q has batch {q.shape[0]} but k and v have {k.shape[0]}; they must be equal")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"q has head dimension {q.shape[3]} but k and v have {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ArgumentError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; q's must be a multiple of k's "
            "(grouped-query attention)"
        )


def check_mask(mask: MaskSpec) -> None:
    """Checks that ``mask`` is the static description and not an array.

    Raises:
      ArgumentError: it is something else.
    """
    if not isinstance(mask, MaskSpec):
        raise ArgumentError(
            f"mask is a {type(mask).__name__}; expected MaskSpec(...): attention takes no mask array, "
            "say who attends to whom by positions and segment_ids"
        )


def check_scores(
    q: ArrayLike,
    soft_cap: float | None,
    sinks: jax.Array | None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> None:
    """Checks what is done to scores.

    Raises:
      ArgumentError: a value out of range, a shape that does not fit, dropout without a key.
    """
    if soft_cap is not None and not soft_cap > 0:
        raise ArgumentError(f"soft_cap is {soft_cap}; it must be above 0, or None for no cap")
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ArgumentError(
            f"sinks has shape {sinks.shape}; expected one score a query head, ({q.shape[2]},)"
        )
    if sinks is not None and not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ArgumentError(f"sinks has dtype {sinks.dtype}; expected a floating-point dtype")
    if not 0 <= dropout_rate < 1:
        raise ArgumentError(f"dropout_rate is {dropout_rate}; it must be at least 0 and below 1")
    if dropout_rate and dropout_key is None:
        raise ArgumentError(
            f"dropout_rate is {dropout_rate} but there is no dropout_key; pass jax.random.key(...)"
        )


def pair_of_labels(
    name: str, labels: Pair, q: jax.Array, k: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """Checks positions or segment ids and brings them into the form (query [B, T], key [B, S]) int32.

    Raises:
      ArgumentError: a shape or dtype that does not fit q and k.
    """
    if labels is None:
        return None, None
    shared = not isinstance(labels, tuple | list)
    if not shared and len(labels) != 2:
        raise ArgumentError(f"{name} has {len(labels)} parts; expected one array or a (query, key) pair")
    if shared and q.shape[1] != k.shape[1]:
        raise ArgumentError(
            f"{name} is one array, but q has {q.shape[1]} tokens and k {k.shape[1]}; pass a (query, key) pair"
        )
    parts = (labels, labels) if shared else labels
    checked = []
    for part, side, like in zip(parts, ("query", "key"), (q, k), strict=True):
        label = name if shared else f"{side} part of {name}"
        part = jnp.asarray(part)
        if not jnp.issubdtype(part.dtype, jnp.integer):
            raise ArgumentError(f"{label} has dtype {part.dtype}; expected integers")
        if part.shape not in (like.shape[:2], (1, like.shape[1])):
            raise ArgumentError(
                f"{label} has shape {part.shape}; expected [batch, tokens] = {like.shape[:2]}, "
                f"or (1, {like.shape[1]}) where the whole batch shares it"
            )
        checked.append(part.astype(jnp.int32))
    return checked[0], checked[1]
