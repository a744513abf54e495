"""The public calls: ``attention`` and its variants on global arrays, ``ring_attention`` on shards."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from agentic_ring.attention.inputs import (
    LAYOUTS,
    AttentionInputs,
    AttentionOptions,
    Expansion,
    Layout,
    Pair,
    Schedule,
    Strategy,
    split_arguments,
)
from agentic_ring.attention.kernels.interface import SoftmaxState, merge, state_dtype
from agentic_ring.attention.kernels.registry import log_once, select_kernel
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.plan import decide, run
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.layout import chunk_run
from agentic_ring.attention.strategies import ShardedAttention
from agentic_ring.errors import ArgumentError, MeshError, UnknownNameError
from agentic_ring.jax_settings import disable_cache_for_cpu_rings
from agentic_ring.mesh import ShardingRules

_OF_PREFIX = ("mesh", "rules", "scale", "soft_cap", "kernel")
"""Options of ``attention`` that hold for a shared prefix too."""
_NOT_WITH_PREFIX = ("alibi_slopes", "head_windows", "dropout_rate", "return_logsumexp")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    rules: ShardingRules = ShardingRules(),
    mask: MaskSpec = MaskSpec(causal=True),
    segment_ids: Pair = None,
    positions: Pair = None,
    hidden_rows: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    head_windows: Sequence[int | None] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    strategy: Strategy | Literal["auto"] = "auto",
    schedule: Schedule = "unidirectional",
    layout: Layout | Literal["auto"] = "auto",
    permuted: bool = False,
    kernel: str = "auto",
    query_chunk: int | None = None,
    key_chunk: int | None = None,
    return_logsumexp: bool = False,
) -> jax.Array:
    """Exact attention over a sequence of any length, sharded over the mesh.

    Batches are spread over the mesh axes data, fsdp and stage, the sequence over ring, heads over tensor
    (``rules`` may name others); axes that the mesh lacks are left out. Works inside ``jax.jit`` and
    outside it, and inside ``jax.shard_map`` over other axes, such as the stages of a pipeline, where
    ``dropout_key`` counts the rows of a shard. Products run at JAX's default precision for the
    platform (``jax.default_matmul_precision``), sums in float32, or in float64 where the inputs are.

    Args:
      q: queries [B, T, N, H].
      k: keys [B, S, K, H], N a multiple of K: query head n attends to key head n // (N / K).
      v: values [B, S, K, V].
      mesh: the mesh to run on; that of ``jax.set_mesh`` where absent, one device without either.
      rules: which mesh axes carry batch, sequence and heads. A pair of axes for the sequence, (outer,
        inner), makes the ring a double ring, and lets "ulysses_ring" exchange heads over the inner.
      mask: static part of the mask.
      segment_ids: int [B, T], or a (query, key) pair. Tokens attend within their segment; a
        negative id is padding, which neither attends nor is attended to.
      positions: int [B, T] (or [1, T]), or a (query, key) pair: the position of each token in its
        sequence, for the mask; counted from 0 where absent. A negative position is padding.
        A caller who passes positions may have permuted the sequence: it is then used as it is.
      hidden_rows: int [B, S, 2] (or [1, S, 2]), a range of positions for each key: the queries from the
        first to before the second do not attend to it, whatever else the mask says. With [B, S, 4] two
        ranges (``hidden_outside``; FlashMask, arXiv 2410.01359).
      scale: factor of the scores; 1 / sqrt(H) where absent.
      soft_cap: scores become soft_cap * tanh(score / soft_cap) (arXiv 2408.00118).
      sinks: float [N], learned scores of one more key per head whose value is 0 (arXiv 2508.10925).
      alibi_slopes: float [N]; a score loses slope * distance of its two tokens' positions (arXiv
        2108.12409). They get no gradient.
      head_windows: N numbers, a sliding window for each query head, None for none; on top of the mask.
      dropout_rate: share of the probabilities that is set to 0, the others divided by 1 - rate. Which
        ones depends only on the key, the row, the head and the two tokens' positions and segment ids,
        not on mesh, strategy, layout or kernel.
      dropout_key: a key of ``jax.random``; needed where the rate is above 0.
      strategy: "local", "ring", "all_gather", "ulysses" or "ulysses_ring" (module ``strategies``);
        "auto" follows the rule of module ``choose_strategy`` and logs what it chose.
      schedule: schedule of a ring; "bidirectional" sends half of each block each way round.
      layout: the order in which the ring holds the sequence while it works ("contiguous", "striped",
        "block_striped", "zigzag"; module ``ring.layout``). "auto", where several devices share the sequence
        and no positions are given: zigzag for a causal mask alone; block_striped with segment ids, a prefix
        or a window that reaches most devices (except on TPUs); else contiguous, which moves nothing.
      permuted: the sequence is in ``layout`` order already, and so is the output: for a model that
        permutes once at its input (module ``ring.layout``), so that no layer has to.
      kernel: one of ``KERNELS``; "auto" takes the best that serves the case.
      query_chunk, key_chunk: queries and keys that the kernel works on at a time; its own choice if absent.
      return_logsumexp: return the logsumexp of the scores as well, to merge attention to other keys with
        (``merge_attention``).

    Returns:
      [B, T, N, V] in q's dtype and sharding; exactly 0 where a query has nothing to attend to. With
      ``return_logsumexp`` (that, the logsumexp [B, T, N] in float32, or float64 where the inputs are: -inf
      where a query has nothing to attend to). Both have gradients.

    Raises:
      ArgumentError: an argument has the wrong shape, dtype or value.
      MeshError: the batch or the heads do not divide over the mesh, or the mesh lacks the ring.
      UnknownNameError: an unknown strategy, schedule, layout or kernel.
    """
    options, inputs = split_arguments(locals())
    return _planned(inputs, options, mesh, rules)


def latent_attention(
    q: jax.Array,
    latent: jax.Array,
    rotated: jax.Array,
    key_weight: jax.Array,
    value_weight: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    rules: ShardingRules = ShardingRules(),
    mask: MaskSpec = MaskSpec(causal=True),
    segment_ids: Pair = None,
    positions: Pair = None,
    scale: float | None = None,
    strategy: Strategy | Literal["auto"] = "auto",
    layout: Layout | Literal["auto"] = "auto",
    permuted: bool = False,
    kernel: str = "auto",
) -> jax.Array:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are made of a latent that heads share.

    What goes round the ring is the latent, R + P numbers a token, and each device expands it to its heads'
    keys and values when it arrives: for DeepSeek-V3 576 numbers instead of 40,960.

    Args:
      q: queries [B, T, N, H + P], the last P of them rotated.
      latent: [B, S, R].
      rotated: the rotated part of the keys, which all heads share, [B, S, P].
      key_weight: [R, N, H]; the other part of the keys of head n is ``latent @ key_weight[:, n]``.
      value_weight: [R, N, V]; likewise the values.
      mesh, rules, mask, segment_ids, positions, scale, strategy, layout, permuted, kernel: see ``attention``.

    Returns:
      [B, T, N, V], as ``attention`` gives it with the expanded keys and values, whose errors are raised too.
    """
    for name, x in (("latent", latent), ("rotated", rotated), ("key_weight", key_weight)):
        if x.ndim != 3 or x.dtype != q.dtype:
            raise ArgumentError(f"{name} is {x.dtype} of shape {x.shape}; expected {q.dtype} with three axes")
    for name, weight in (("key_weight", key_weight), ("value_weight", value_weight)):
        if weight.shape[:2] != (latent.shape[2], q.shape[2]):
            raise ArgumentError(
                f"{name} has shape {weight.shape}; expected [R, N, ...] = {(latent.shape[2], q.shape[2])}"
            )
    expansion, pair = Expansion(key_weight, value_weight), (latent[:, :, None], rotated[:, :, None])
    k, v = jax.eval_shape(expansion, *pair)
    options, inputs = split_arguments(locals())
    inputs = replace(inputs, k=pair[0], v=pair[1], expansion=expansion)
    return _planned(inputs, options, mesh, rules)


def _planned(
    inputs: AttentionInputs, options: AttentionOptions, mesh: Mesh | AbstractMesh | None, rules: ShardingRules
) -> jax.Array:
    decision = decide(inputs, options, mesh, rules)
    if (used := decision.plan.placement.mesh) is not None:
        disable_cache_for_cpu_rings(decision.platform, used.size)
    if varying := jax.typeof(inputs.q).manual_axis_type.varying:
        raise MeshError(
            f"attention was called inside jax.shard_map on values that vary over {', '.join(varying)} by "
            "their type, and JAX cannot differentiate a nested shard_map of such values; pass "
            "check_vma=False to the outer shard_map"
        )
    log_once(f"attention strategy {decision.choice.strategy}: {decision.choice.reason}")
    if decision.plan.placement.explicit:
        # An array made outside the mesh has no sharding in its type, and its gradient would have none.
        inputs = jax.tree.map(
            lambda x: jax.reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x, inputs
        )
    return run(decision.plan, inputs)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str | Iterable[str] | None,
    mask: MaskSpec,
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
    layout: Layout = "contiguous",
    schedule: Schedule = "unidirectional",
    kernel: str = "auto",
    query_chunk: int | None = None,
    key_chunk: int | None = None,
    return_logsumexp: bool = False,
) -> jax.Array:
    """Attention of this device's queries to the whole sequence, for use inside ``jax.shard_map``.

    Args:
      q, k, v: this device's queries [B, T, N, H], keys and values [B, S, K, H]; N is a multiple of K.
      axis_name: mesh axis that the sequence is sharded over; None where it is not. A pair
        (outer, inner) makes a double ring: blocks go round the inner axis, on fast links, for each
        hop on the outer one.
      positions: positions of this device's tokens in the whole sequence, int [B, T] or [1, T], or
        a (query, key) pair. Where absent they follow from ``layout``, and hops need no mask.
      segment_ids: segment ids of this device's tokens, in the same form. A negative id is padding.
      sinks: scores of the sinks of this device's query heads, float [N]; see ``attention``.
      dropout_key: the same on every device of the ring. Where devices hold different rows of a batch
        or different heads, fold their place in those into it.
      layout: the order in which the devices hold the sequence.
      alibi_slopes, head_windows: likewise of this device's query heads.
      hidden_rows: ranges of this device's keys, int [B, S, 2 or 4] (or [1, S, 2 or 4]).
      mask, scale, soft_cap, dropout_rate, schedule, kernel, query_chunk, key_chunk, return_logsumexp: see
        ``attention``, whose results for this device's queries are returned and whose errors are raised.
    """
    if layout not in LAYOUTS:
        raise UnknownNameError("layout", layout, LAYOUTS)
    axis = RingAxis.over(axis_name)
    options, inputs = split_arguments({**locals(), "strategy": "ring", "permuted": True})
    sharded = ShardedAttention(
        options,
        select_kernel(kernel, query_chunk, key_chunk, run=chunk_run(layout, q.shape[1], axis.size)),
        inner=jax.lax.axis_size(axis.names[-1]) if len(axis.names) > 1 else 1,
    )
    state = sharded.attend_whole_sequence(axis, inputs, first_row=jnp.int32(0), first_head=jnp.int32(0))
    return tuple(state) if return_logsumexp else state.output  # pyright: ignore[reportReturnType]


def merge_attention(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Attention to the union of two disjoint sets of keys, from attention to each.

    All are (output [B, T, N, V], logsumexp [B, T, N]), as ``attention`` returns them with
    ``return_logsumexp``; the output is in the dtype of ``a``'s.
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

    Raises:
      ArgumentError: the prefix does not fit, or an option has no meaning for it.
    """
    if refused := [name for name in _NOT_WITH_PREFIX if name in options]:
        raise ArgumentError(f"{refused[0]} was given, but a shared prefix does not take it; leave it out")
    if prefix_k.shape[1:] != k.shape[2:] or prefix_v.shape != (*prefix_k.shape[:2], v.shape[3]):
        raise ArgumentError(
            f"prefix_k has shape {prefix_k.shape} and prefix_v {prefix_v.shape}; expected [S, K, H] and "
            f"[S, K, V] with (K, H) = {k.shape[2:]} and V = {v.shape[3]}"
        )
    own = attention(q, k, v, return_logsumexp=True, **options)
    options = {name: options[name] for name in _OF_PREFIX if name in options}
    options |= {"mask": MaskSpec(causal=False), "return_logsumexp": True}
    output, logsumexp = attention(q.reshape(1, -1, *q.shape[2:]), prefix_k[None], prefix_v[None], **options)
    prefix = output.reshape(*q.shape[:3], -1), logsumexp.reshape(q.shape[:3])
    return merge_attention((own[0], own[1]), prefix)[0]
