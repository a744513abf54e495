"""Attention on global arrays: pads, shards over the mesh, balances the ring, and undoes all three."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from agentic_ring.attention.arguments import Pair, check_arrays, check_mask, pair_of_labels
from agentic_ring.attention.exchange import from_layout, to_layout
from agentic_ring.attention.kernels import select_kernel
from agentic_ring.attention.layout import LAYOUTS, Layout, padded_length, shard_order
from agentic_ring.attention.mask import PADDING, MaskSpec, TokenLabels
from agentic_ring.attention.placement import Placement, place
from agentic_ring.attention.ring import ring_attention
from agentic_ring.errors import UnknownNameError

Strategy = Literal["local", "ring"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    mask: MaskSpec = MaskSpec(causal=True),
    segment_ids: Pair = None,
    positions: Pair = None,
    scale: float | None = None,
    strategy: Strategy | Literal["auto"] = "auto",
    layout: Layout | Literal["auto"] = "auto",
    kernel: str = "auto",
    query_chunk: int | None = None,
    key_chunk: int | None = None,
) -> jax.Array:
    """Exact attention over a sequence of any length, sharded over the mesh.

    Batches are spread over the mesh axes data and fsdp, the sequence over ring, heads over tensor;
    axes that the mesh lacks are left out. Works inside ``jax.jit`` and outside it. Products run at
    JAX's default precision for the platform (``jax.default_matmul_precision``), sums in float32.

    Args:
      q: queries [B, T, N, H].
      k: keys [B, S, K, H], N a multiple of K: query head n attends to key head n // (N / K).
      v: values [B, S, K, H].
      mesh: the mesh to run on; that of ``jax.set_mesh`` where absent, one device without either.
      mask: static part of the mask.
      segment_ids: int [B, T], or a (query, key) pair. Tokens attend within their segment; a
        negative id is padding, which neither attends nor is attended to.
      positions: int [B, T] (or [1, T]), or a (query, key) pair: where each token stands in its
        sequence, for the causal mask; counted from 0 where absent. A negative position is padding.
        A caller who passes positions may have permuted the sequence: it is then used as it is.
      scale: of the scores; 1 / sqrt(H) where absent.
      strategy: "local": no sharding of the sequence. "ring": keys and values travel round the ring.
        "auto": ring where the mesh has one of more than one device and T = S, else local.
      layout: the order in which the ring holds the sequence while it works ("contiguous",
        "striped", "zigzag"). "auto": zigzag where the mask is causal, the ring longer than one
        device, and no positions are given; else contiguous, which moves nothing.
      kernel: one of ``KERNELS``; "auto" takes the best that serves the case.
      query_chunk: queries that the kernel works on at a time; chosen by the kernel where absent.
      key_chunk: keys that the kernel works on at a time; likewise.

    Returns:
      [B, T, N, H] in q's dtype and sharding; exactly 0 where a query has nothing to attend to.

    Raises:
      ArgumentError: an argument has the wrong shape, dtype or value.
      MeshError: the batch or the heads do not divide over the mesh, or the mesh lacks the ring.
      UnknownNameError: an unknown strategy, layout or kernel.
    """
    check_arrays(q, k, v)
    check_mask(mask)
    select_kernel(kernel, query_chunk, key_chunk)
    if strategy not in ("auto", *STRATEGIES):
        raise UnknownNameError("strategy", strategy, ("auto", *STRATEGIES))
    if layout not in ("auto", *LAYOUTS):
        raise UnknownNameError("layout", layout, ("auto", *LAYOUTS))
    positions_pair = pair_of_labels("positions", positions, q, k)
    segments_pair = pair_of_labels("segment_ids", segment_ids, q, k)
    query, key = (TokenLabels(*pair) for pair in zip(positions_pair, segments_pair, strict=True))
    ring = None if strategy == "auto" else strategy == "ring"
    placement = place(mesh, q.shape, k.shape, ring)
    balance = mask.causal and positions is None and placement.ring > 1
    plan = _Plan(
        placement=placement,
        layout=layout if layout != "auto" else "zigzag" if balance else "contiguous",
        mask=mask,
        scale=None if scale is None else float(scale),
        kernel=kernel,
        query_chunk=query_chunk,
        key_chunk=key_chunk,
    )
    arrays = q, k, v, query, key
    if placement.explicit:
        # An array made outside the mesh has no sharding in its type, and its gradient would have none.
        arrays = jax.tree.map(
            lambda x: jax.reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x, arrays
        )
    return _attention(plan, *arrays)


@dataclass(frozen=True)
class _Plan:
    """What is static about one call."""

    placement: Placement
    layout: Layout
    mask: MaskSpec
    scale: float | None
    kernel: str
    query_chunk: int | None
    key_chunk: int | None

    def padded(self, length: int) -> int:
        """The length that spreads evenly over the ring in this layout."""
        ring = self.placement.ring
        # Tokens are dealt into stripes device by device, so each device's block has to divide as well.
        return padded_length(length, ring, self.layout, unit=ring if self.layout == "striped" else 1)


@functools.partial(jax.jit, static_argnums=0)
def _attention(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, query: TokenLabels, key: TokenLabels
) -> jax.Array:
    """Under jit, so that the layers of a model share one trace and a call outside jit runs as one program."""
    if not plan.placement.explicit:
        return _sharded(plan, q, k, v, query, key)
    # What follows leaves shardings to the compiler, so the explicit axes are automatic for a while.
    sharded = functools.partial(_sharded, plan)
    run = jax.sharding.auto_axes(sharded, out_sharding=jax.typeof(q).sharding)
    return cast(Callable[..., jax.Array], run)(q, k, v, query, key)


def _sharded(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, query: TokenLabels, key: TokenLabels
) -> jax.Array:
    place = plan.placement
    lengths = q.shape[1], k.shape[1]
    attend = functools.partial(_on_device, plan, lengths)
    if place.mesh is None:
        return attend(q, k, v, query, key)
    q_padding, k_padding = (plan.padded(length) - length for length in lengths)
    query, key = query.pad(q_padding), key.pad(k_padding)
    in_specs = (
        place.queries_spec,
        place.keys_spec,
        place.keys_spec,
        query.map(place.labels_spec),
        key.map(place.labels_spec),
    )
    # An abstract mesh is the ambient one already.
    mesh = place.mesh if isinstance(place.mesh, Mesh) else None
    output = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=place.queries_spec)(
        _pad(q, q_padding), _pad(k, k_padding), _pad(v, k_padding), query, key
    )
    return output[:, : lengths[0]] if q_padding else output


def _on_device(
    plan: _Plan,
    lengths: tuple[int, int],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query: TokenLabels,
    key: TokenLabels,
) -> jax.Array:
    """What one device does: balance the ring, attend, undo the balance."""
    axis = plan.placement.sequence
    if axis is not None:
        q, k, v, query, key = jax.tree.map(lambda x: to_layout(x, plan.layout, axis), (q, k, v, query, key))
    positions = _pair(query.positions, key.positions)
    segment_ids = _pair(query.segment_ids, key.segment_ids)
    if positions is None:
        positions = _default_positions(plan, lengths, has_segments=segment_ids is not None)
    output = ring_attention(
        q,
        k,
        v,
        axis_name=axis,
        mask=plan.mask,
        positions=positions,
        segment_ids=segment_ids,
        scale=plan.scale,
        kernel=plan.kernel,
        query_chunk=plan.query_chunk,
        key_chunk=plan.key_chunk,
    )
    return output if axis is None else from_layout(output, plan.layout, axis)


def _pair(query: jax.Array | None, key: jax.Array | None) -> Pair:
    return None if query is None or key is None else (query, key)


def _default_positions(plan: _Plan, lengths: tuple[int, int], has_segments: bool) -> Pair:
    """Positions [1, T] and [1, S] of this device's tokens, counted from 0; None where none matter."""
    padded = tuple(plan.padded(length) for length in lengths)
    if not plan.mask.causal and (padded == lengths or has_segments):
        return None
    axis = plan.placement.sequence
    index = 0 if axis is None else jax.lax.axis_index(axis)

    def positions(length: int, padded: int) -> jax.Array:
        place = jnp.asarray(shard_order(plan.layout, padded, plan.placement.ring, index))[None]
        return jnp.where(place < length, place, PADDING)

    return positions(lengths[0], padded[0]), positions(lengths[1], padded[1])


def _pad(x: jax.Array, amount: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, amount), (0, 0), (0, 0))) if amount else x
