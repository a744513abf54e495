"""What an attention call is given, and its checks: static options, and the arrays as one pytree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.mask import MaskSpec, TokenLabels
from agentic_ring.errors import ArgumentError, check_choice

Strategy = Literal["local", "ring", "all_gather", "ulysses", "ulysses_ring"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""How devices share a sequence; see ``strategies``."""

Layout = Literal["contiguous", "striped", "block_striped", "zigzag"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""The order in which the ring holds a sequence; see ``ring.layout``."""

Schedule = Literal["unidirectional", "bidirectional"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
"""In which directions blocks of keys travel round the ring; see ``ring.transport``."""


@dataclass(frozen=True)
class AttentionOptions:
    """The static options of one call; each is described at ``attention``, whose errors they raise."""

    mask: MaskSpec = MaskSpec(causal=True)
    scale: float | None = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    strategy: Strategy | Literal["auto"] = "auto"
    schedule: Schedule = "unidirectional"
    layout: Layout | Literal["auto"] = "auto"
    permuted: bool = False
    kernel: str = "auto"
    query_chunk: int | None = None
    key_chunk: int | None = None
    return_logsumexp: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mask, MaskSpec):
            raise ArgumentError(
                f"mask is a {type(self.mask).__name__}; expected MaskSpec(...): attention takes no mask "
                "array; describe the mask by MaskSpec, positions and segment_ids"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ArgumentError(f"soft_cap is {self.soft_cap}; it must be above 0, or None for no cap")
        if not 0 <= self.dropout_rate < 1:
            raise ArgumentError(f"dropout_rate is {self.dropout_rate}; it must be at least 0 and below 1")
        check_choice(self, "strategy", ("auto", *STRATEGIES))
        check_choice(self, "schedule", SCHEDULES)
        check_choice(self, "layout", ("auto", *LAYOUTS))
        if self.scale is not None:
            object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "dropout_rate", float(self.dropout_rate))


Pair = jax.Array | tuple[jax.Array, jax.Array] | None
"""Labels of the tokens: one array for self-attention, a (query, key) pair, or none."""

ArrayLike = jax.Array | jax.ShapeDtypeStruct
"""An array, or a description of its shape and dtype."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Expansion:
    """Weights that make the keys and values of every head from a latent that all heads share."""

    key_weight: jax.Array  # [R, N, H], of the part of the keys that is not rotated
    value_weight: jax.Array  # [R, N, V]

    def __call__(self, latent: jax.Array, rotated: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, N, H + P], values [B, S, N, V] of latents [B, S, 1, R], rotated keys [B, S, 1, P]."""

        def of_heads(weight: jax.Array) -> jax.Array:
            return jnp.einsum("bsr,rnh->bsnh", latent[:, :, 0], weight)

        keys = of_heads(self.key_weight)
        shared = jnp.broadcast_to(rotated, (*keys.shape[:3], rotated.shape[3]))
        return jnp.concatenate((keys, shared), axis=-1), of_heads(self.value_weight)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """The arrays of one attention call: global ones, or the shards of one device.

    Attributes:
      q: queries [B, T, N, H].
      k, v: keys [B, S, K, H] and values [B, S, K, V]; with an expansion, what it makes them of.
      sinks, slopes: float [N], or None.
      windows: int32 [N], or None.
      expansion: makes keys and values where they are needed, or None.
      query, key: labels of the queries and of the keys, as ``HopMask`` needs them.
      dropout_key: key of ``jax.random``, or None for no dropout.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sinks: jax.Array | None = None
    slopes: jax.Array | None = None
    windows: jax.Array | None = None
    expansion: Expansion | None = None
    query: TokenLabels = TokenLabels()
    key: TokenLabels = TokenLabels()
    dropout_key: jax.Array | None = None


def split_arguments(arguments: Mapping[str, Any]) -> tuple[AttentionOptions, AttentionInputs]:
    """Static options and checked arrays of a call, from the arguments of ``attention`` by name.

    All but q, k and v may be absent. Raises the errors of ``attention``.
    """
    static = (field.name for field in fields(AttentionOptions) if field.name in arguments)
    options = AttentionOptions(**{name: arguments[name] for name in static})
    q, k, v = (arguments[name] for name in "qkv")
    _check_arrays(q, k, v)
    heads, rate, given = q.shape[2], options.dropout_rate, arguments.get
    sinks, slopes, dropout_key = given("sinks"), given("alibi_slopes"), given("dropout_key")
    for name, x in (("sinks", sinks), ("alibi_slopes", slopes)):
        if x is not None and not (x.shape == (heads,) and jnp.issubdtype(x.dtype, jnp.floating)):
            raise ArgumentError(
                f"{name} is {x.dtype} of shape {x.shape}; expected a float per query head, ({heads},)"
            )
    if rate and dropout_key is None:
        raise ArgumentError(f"dropout_rate is {rate} but there is no dropout_key; pass jax.random.key(...)")
    positions, segments = (_pair_of_labels(name, given(name), q, k) for name in ("positions", "segment_ids"))
    query, key = (TokenLabels(*pair) for pair in zip(positions, segments, strict=True))
    key = replace(key, hidden=_ranges(given("hidden_rows"), k))
    windows = _windows(given("head_windows"), heads)
    return options, AttentionInputs(
        q, k, v, sinks, slopes, windows, None, query, key, dropout_key if rate else None
    )


def _check_arrays(q: ArrayLike, k: ArrayLike, v: ArrayLike) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            expected = "[B, T, N, H]" if name == "q" else "[B, S, K, H]"
            raise ArgumentError(f"{name} has shape {x.shape}; expected four axes {expected}, none empty")
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != q.dtype:
            raise ArgumentError(f"{name} is {x.dtype}; expected one floating-point dtype, q is {q.dtype}")
    if k.shape[:3] != v.shape[:3]:
        raise ArgumentError(
            f"k has shape {k.shape} but v has {v.shape}; they must be equal but for the last axis"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ArgumentError(
            f"q has shape {q.shape} but k has {k.shape}; batch and head dimension must be equal"
        )
    if q.shape[2] % k.shape[2]:
        raise ArgumentError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; q's must be a multiple of k's "
            "(grouped-query attention)"
        )


def _ranges(hidden_rows: ArrayLike | None, k: ArrayLike) -> tuple[tuple[jax.Array, jax.Array], ...] | None:
    """The ranges of rows that keys are hidden from, as ``TokenLabels`` holds them."""
    if hidden_rows is None:
        return None
    hidden_rows, (batch, keys) = jnp.asarray(hidden_rows), k.shape[:2]
    shapes = [(rows, keys, size) for rows in (1, batch) for size in (2, 4)]
    if hidden_rows.shape not in shapes or not jnp.issubdtype(hidden_rows.dtype, jnp.integer):
        raise ArgumentError(
            f"hidden_rows is {hidden_rows.dtype} of shape {hidden_rows.shape}; expected integers "
            f"{(batch, keys)} or {(1, keys)} and 2 or 4: the first row and the one after the last of one or "
            "two ranges of each key"
        )
    parts = [hidden_rows[..., i].astype(jnp.int32) for i in range(hidden_rows.shape[2])]
    return tuple(zip(parts[::2], parts[1::2], strict=True))


def _windows(windows: Sequence[int | None] | None, heads: int) -> jax.Array | None:
    if windows is None:
        return None
    if len(windows) != heads or any(window is not None and window < 1 for window in windows):
        raise ArgumentError(
            f"head_windows is {windows}; expected {heads} numbers, one per query head, each at least 1, the "
            "token itself, or None"
        )
    return jnp.array([np.iinfo(np.int32).max if x is None else x for x in windows], jnp.int32)


def _pair_of_labels(
    name: str, labels: Pair, q: ArrayLike, k: ArrayLike
) -> tuple[jax.Array | None, jax.Array | None]:
    """Checks positions or segment ids and brings them into the form (query [B, T], key [B, S]) int32."""
    if labels is None:
        return None, None
    shared = not isinstance(labels, tuple | list)
    parts = (labels, labels) if shared else labels
    if len(parts) != 2 or (shared and q.shape[1] != k.shape[1]):
        given = "one array" if shared else f"{len(parts)} arrays"
        raise ArgumentError(
            f"{name} is {given}, but q has {q.shape[1]} tokens and k {k.shape[1]}; pass a (query, key) pair"
        )

    def checked(part: jax.Array, label: str, like: ArrayLike) -> jax.Array:
        part, shapes = jnp.asarray(part), (like.shape[:2], (1, like.shape[1]))
        if part.shape not in shapes or not jnp.issubdtype(part.dtype, jnp.integer):
            raise ArgumentError(
                f"{label} is {part.dtype} of shape {part.shape}; expected integers [batch, tokens] = "
                f"{shapes[0]}, or {shapes[1]} where the whole batch shares it"
            )
        return part.astype(jnp.int32)

    names = (name, name) if shared else (f"query part of {name}", f"key part of {name}")
    return checked(parts[0], names[0], q), checked(parts[1], names[1], k)
