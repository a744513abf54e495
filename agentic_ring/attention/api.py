"""Attention on global arrays: pads, shards over the mesh, balances the ring, and undoes all three."""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from agentic_ring.attention.arguments import Pair, check_arrays, check_mask, check_scores, pair_of_labels
from agentic_ring.attention.axis import RingAxis
from agentic_ring.attention.choice import Choice, Shapes, choose_strategy, refusal, ulysses_degree
from agentic_ring.attention.kernels import mesh_platform, select_kernel
from agentic_ring.attention.layout import LAYOUTS, Layout, padded_length
from agentic_ring.attention.mask import MaskSpec, TokenLabels
from agentic_ring.attention.placement import Placement, place
from agentic_ring.attention.scores import Dropout, Scores
from agentic_ring.attention.strategies import STRATEGIES, Sharded, Strategy
from agentic_ring.attention.transport import SCHEDULES, Schedule
from agentic_ring.errors import ArgumentError, MeshError, UnknownNameError
from agentic_ring.mesh import ShardingRules

_log = logging.getLogger(__name__)


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
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    strategy: Strategy | Literal["auto"] = "auto",
    schedule: Schedule = "unidirectional",
    layout: Layout | Literal["auto"] = "auto",
    permuted: bool = False,
    kernel: str = "auto",
    query_chunk: int | None = None,
    key_chunk: int | None = None,
) -> jax.Array:
    """Exact attention over a sequence of any length, sharded over the mesh.

    Batches are spread over the mesh axes data and fsdp, the sequence over ring, heads over tensor
    (``rules`` may name others); axes that the mesh lacks are left out. Works inside ``jax.jit`` and
    outside it. Products run at JAX's default precision for the platform
    (``jax.default_matmul_precision``), sums in float32.

    Args:
      q: queries [B, T, N, H].
      k: keys [B, S, K, H], N a multiple of K: query head n attends to key head n // (N / K).
      v: values [B, S, K, H].
      mesh: the mesh to run on; that of ``jax.set_mesh`` where absent, one device without either.
      rules: which mesh axes carry batch, sequence and heads. A pair of axes for the sequence, (outer,
        inner), makes the ring a double ring, and lets "ulysses_ring" exchange heads over the inner.
      mask: static part of the mask.
      segment_ids: int [B, T], or a (query, key) pair. Tokens attend within their segment; a
        negative id is padding, which neither attends nor is attended to.
      positions: int [B, T] (or [1, T]), or a (query, key) pair: where each token stands in its
        sequence, for the mask; counted from 0 where absent. A negative position is padding.
        A caller who passes positions may have permuted the sequence: it is then used as it is.
      scale: of the scores; 1 / sqrt(H) where absent.
      soft_cap: scores become soft_cap * tanh(score / soft_cap) (arXiv 2408.00118).
      sinks: float [N], the score of one more key a head whose value is 0, learned (arXiv 2508.10925).
      dropout_rate: share of the probabilities that is set to 0, the others divided by 1 - rate. Which
        ones depends on the key, the row, the head and the two tokens' positions and segment ids
        alone, not on mesh, strategy, layout or kernel.
      dropout_key: of ``jax.random``; needed where the rate is above 0.
      strategy: "local", "ring", "all_gather", "ulysses" or "ulysses_ring" (module ``strategies``);
        "auto" follows the rule of module ``choice`` and logs what it chose.
      schedule: of a ring; "bidirectional" sends half of each block each way round.
      layout: the order in which the ring holds the sequence while it works ("contiguous",
        "striped", "zigzag"). "auto": zigzag where the mask is causal without window or prefix, several
        devices share the sequence, and no positions are given; else contiguous, which moves nothing.
      permuted: the sequence is in ``layout`` order already, and so is the output: for a model that
        permutes once at its input (module ``layout``), so that no layer has to.
      kernel: one of ``KERNELS``; "auto" takes the best that serves the case.
      query_chunk: queries that the kernel works on at a time; chosen by the kernel where absent.
      key_chunk: keys that the kernel works on at a time; likewise.

    Returns:
      [B, T, N, H] in q's dtype and sharding; exactly 0 where a query has nothing to attend to.

    Raises:
      ArgumentError: an argument has the wrong shape, dtype or value.
      MeshError: the batch or the heads do not divide over the mesh, or the mesh lacks the ring.
      UnknownNameError: an unknown strategy, schedule, layout or kernel.
    """
    check_arrays(q, k, v)
    check_mask(mask)
    check_scores(q, soft_cap, sinks, dropout_rate, dropout_key)
    for kind, name, known in (
        ("strategy", strategy, ("auto", *STRATEGIES)),
        ("schedule", schedule, SCHEDULES),
        ("layout", layout, ("auto", *LAYOUTS)),
    ):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    labels = pair_of_labels("positions", positions, q, k), pair_of_labels("segment_ids", segment_ids, q, k)
    query, key = (TokenLabels(*pair) for pair in zip(*labels, strict=True))

    placement = place(mesh, rules, q.shape, k.shape, strategy)
    platform = mesh_platform(placement.mesh)
    rows, heads, key_heads = placement.local((q.shape[0], q.shape[2], k.shape[2]))
    shapes = Shapes(
        ring=placement.ring,
        inner=placement.inner,
        batch=rows,
        tokens=-(-q.shape[1] // placement.ring),
        same_length=q.shape[1] == k.shape[1],
        heads=heads,
        key_heads=key_heads,
        head_dim=q.shape[3],
        itemsize=q.dtype.itemsize,
    )
    choice = Choice(strategy, "asked for") if strategy != "auto" else choose_strategy(shapes, mask, platform)
    if (why := refusal(shapes, choice.strategy)) is not None:
        raise MeshError(f'strategy is "{choice.strategy}" but {why}; choose another strategy or mesh')
    _log_once(choice.strategy, choice.reason)
    balance = mask.causal and mask.window is None and not mask.prefix and positions is None
    if layout == "auto":
        layout = "zigzag" if balance and placement.ring > 1 and not permuted else "contiguous"
    sharded = Sharded(
        mask=mask,
        kernel=select_kernel(kernel, query_chunk, key_chunk, platform),
        given=layout if permuted else "contiguous",
        layout=layout,
        gather=choice.strategy == "all_gather",
        inner=placement.inner if choice.strategy == "ring" and placement.inner < placement.ring else 1,
        ulysses=ulysses_degree(shapes, choice.strategy),
        schedule=schedule,
    )
    plan = _Plan(placement, sharded, None if scale is None else float(scale), soft_cap, float(dropout_rate))
    if permuted:
        plan.check_permuted(q.shape[1], k.shape[1])
    arrays = q, k, v, sinks, query, key, dropout_key if dropout_rate else None
    if placement.explicit:
        # An array made outside the mesh has no sharding in its type, and its gradient would have none.
        arrays = jax.tree.map(
            lambda x: jax.reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x, arrays
        )
    return _attention(plan, *arrays)


@functools.cache
def _log_once(strategy: str, reason: str) -> None:
    _log.info("attention strategy %s: %s", strategy, reason)


@dataclass(frozen=True)
class _Plan:
    """What is static about one call."""

    placement: Placement
    sharded: Sharded
    scale: float | None
    soft_cap: float | None
    dropout_rate: float

    def padded(self, length: int) -> int:
        """The length that spreads evenly over the devices in this layout and schedule."""
        devices, sharded = self.placement.ring, self.sharded
        ring = devices // sharded.ulysses
        # Tokens are dealt into stripes device by device, so each device's block has to divide as well.
        length = padded_length(length, ring, sharded.layout, unit=ring if sharded.layout == "striped" else 1)
        quarters = 4 * ring if sharded.schedule == "bidirectional" and ring > 1 else 1
        halves = 2 * ring if sharded.layout == "zigzag" and ring > 1 else 1
        multiple = math.lcm(devices, quarters, halves, length if sharded.layout == "striped" else 1)
        return -(-length // multiple) * multiple

    def check_permuted(self, *lengths: int) -> None:
        """A caller who permuted the sequence has padded it as well, and knows over how many devices."""
        for length in lengths:
            if self.placement.ring > 1 and self.padded(length) != length:
                raise ArgumentError(
                    f"permuted=True with {length} tokens, which do not spread evenly over "
                    f"{self.placement.ring} devices in {self.sharded.layout} order; pad them to "
                    f"{self.padded(length)} before permuting (agentic_ring.attention.padded_length)"
                )


@functools.partial(jax.jit, static_argnums=0)
def _attention(
    plan: _Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    query: TokenLabels,
    key: TokenLabels,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Under jit, so that the layers of a model share one trace and a call outside jit runs as one program."""
    arrays = q, k, v, sinks, query, key, dropout_key
    if not plan.placement.explicit:
        return _sharded(plan, *arrays)
    # What follows leaves shardings to the compiler, so the explicit axes are automatic for a while.
    sharded = functools.partial(_sharded, plan)
    run = jax.sharding.auto_axes(sharded, out_sharding=jax.typeof(q).sharding)
    return cast(Callable[..., jax.Array], run)(*arrays)


def _sharded(
    plan: _Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    query: TokenLabels,
    key: TokenLabels,
    dropout_key: jax.Array | None,
) -> jax.Array:
    place = plan.placement
    attend = functools.partial(_on_device, plan)
    if place.mesh is None:
        return attend(q, k, v, sinks, query, key, dropout_key)
    lengths = q.shape[1], k.shape[1]
    q_padding, k_padding = (plan.padded(length) - length for length in lengths)
    if k_padding and not _padding_is_later(plan, lengths, query):
        query, key = (_with_segments(labels, n) for labels, n in zip((query, key), lengths, strict=True))
    query, key = query.pad(q_padding), key.pad(k_padding)
    in_specs = (
        place.queries_spec,
        place.keys_spec,
        place.keys_spec,
        None if sinks is None else PartitionSpec(place.heads),
        query.map(place.labels_spec),
        key.map(place.labels_spec),
        None if dropout_key is None else PartitionSpec(),
    )
    # An abstract mesh is the ambient one already.
    mesh = place.mesh if isinstance(place.mesh, Mesh) else None
    output = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=place.queries_spec)(
        _pad(q, q_padding), _pad(k, k_padding), _pad(v, k_padding), sinks, query, key, dropout_key
    )
    return output[:, : lengths[0]] if q_padding else output


def _padding_is_later(plan: _Plan, lengths: tuple[int, int], query: TokenLabels) -> bool:
    """Whether no query would attend to keys added at the end, even if nothing marked them as padding."""
    mask = plan.sharded.mask
    counted = query.positions is None and lengths[0] == lengths[1]
    return counted and mask.causal and mask.prefix <= lengths[0]


def _with_segments(labels: TokenLabels, length: int) -> TokenLabels:
    """The labels, which can now be padded: one segment for all tokens where they said nothing."""
    if labels.positions is not None or labels.segment_ids is not None:
        return labels
    return TokenLabels(segment_ids=jnp.zeros((1, length), jnp.int32))


def _pad(x: jax.Array, amount: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, amount), (0, 0), (0, 0))) if amount else x


def _on_device(
    plan: _Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    query: TokenLabels,
    key: TokenLabels,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """What one device does."""
    place = plan.placement

    def first(axes: tuple[str, ...], size: int) -> jax.Array:
        return jnp.int32(jax.lax.axis_index(axes) * size if axes else 0)

    scores = Scores(
        q.shape[3] ** -0.5 if plan.scale is None else plan.scale,
        plan.soft_cap,
        Dropout.of(
            plan.dropout_rate, dropout_key, first(place.batch, q.shape[0]), first(place.heads, q.shape[2])
        ),
    )
    axis = RingAxis.over(place.sequence)
    return plan.sharded.attend(axis, q, k, v, sinks, query, key, scores)
