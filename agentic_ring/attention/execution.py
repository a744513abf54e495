"""Runs a planned call on global arrays: pads them, shards them over the mesh, and undoes both."""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from agentic_ring.attention.mask import TokenLabels
from agentic_ring.attention.plan import Plan
from agentic_ring.attention.ring.axis import RingAxis
from agentic_ring.attention.scores import Dropout, Scores


@functools.partial(jax.jit, static_argnums=0)
def run(
    plan: Plan,
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
    plan: Plan,
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


def _padding_is_later(plan: Plan, lengths: tuple[int, int], query: TokenLabels) -> bool:
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
    plan: Plan,
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
