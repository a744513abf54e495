"""Layers in pipeline stages: each stage applies its layers to one microbatch after another.

    tick       0    1    2    3    4    5
    stage 0   m0   m1   m2   m3    .    .
    stage 1    .   m0   m1   m2   m3    .      3 stages, 4 microbatches: 6 ticks, of which 2 are a bubble
    stage 2    .    .   m0   m1   m2   m3

After each tick the activations travel to the next stage. The backward pass is the derivative of this loop: it
runs the same schedule in reverse (GPipe, arXiv 1811.06965). All other axes of the mesh work within a stage as
they do without stages.

Inputs and outputs wait in queues that are sharded over the stages, so that each stage stores only its part:

    * stage 0 takes the microbatch at the head of its queue, and fills the place with that of stage 1, which
      takes that of stage 2, and so on;
    * the last stage, which has no stage to take from, puts its output there.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from agentic_ring.errors import MeshError
from agentic_ring.mesh import ShardingRules, constrain, devices_along

MICROBATCHES_PER_STAGE = 4
"""Maximum number. More of them make the bubble shorter, and the products of each tick smaller."""


def microbatches_per_stage(rows: int) -> int:
    """The largest divisor of ``rows`` per device of the batch axes, stages included, up to the maximum."""
    return max(n for n in range(1, MICROBATCHES_PER_STAGE + 1) if rows % n == 0)


def count_ticks(stages: int, microbatches: int) -> int:
    """Number of times that a stage applies its layers in one pass; ``stages - 1`` of them are a bubble."""
    return microbatches + stages - 1


def accumulation_parts(rows: int, stages: int) -> int:
    """Number of parts in which gradients of ``rows`` rows per device of the batch axes are accumulated.

    One row at a time without stages; with stages as many rows as there are microbatches per stage.
    """
    return rows if stages == 1 else rows // microbatches_per_stage(rows)


def layers_per_stage(layers: int, stages: int) -> int:
    """Returns the number of layers of each stage; raises a MeshError if they do not divide."""
    if layers % stages:
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        raise MeshError(
            f"{layers} layers do not divide over {stages} stages; choose a number of stages from "
            f"{', '.join(map(str, divisors))}"
        )
    return layers // stages


def ambient_stages(rules: ShardingRules) -> int:
    """Number of stages of the ambient mesh; 1 if it lacks their axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return prod(mesh.shape.get(axis, 1) for axis in rules.layer)


def apply_in_stages(
    apply: Callable[[Any, jax.Array, Any], jax.Array],
    layers: Any,
    x: jax.Array,
    labels: Any,
    rules: ShardingRules,
) -> jax.Array:
    """Applies all layers to x [B, T, D], each stage of the ambient mesh its own.

    Args:
      apply: applies the layers of one stage to one microbatch with its labels, [b, T, D] -> [b, T, D].
      layers: a tree of arrays [layers, ...], sharded over the stages.
      x: sharded over the batch axes of ``rules``, of which the last is the stage, and over the sequence; so
        is the result.
      labels: a tree of arrays [B, T, ...], or [1, T, ...] for all rows; not differentiated.
    """
    stages = ambient_stages(rules)
    if len(rules.layer) != 1 or rules.batch[-1:] != rules.layer:
        raise MeshError(
            f"the sharding rules put layers on {rules.layer} and batches on {rules.batch}; with stages, "
            "layers need one mesh axis, which must be the last one of the batch"
        )
    (axis,) = rules.layer
    layers_per_stage(len(jax.tree.leaves(layers)[0]), stages)
    within = replace(rules, batch=rules.batch[:-1])
    shards = devices_along(jax.sharding.get_abstract_mesh(), within.batch)
    if x.shape[0] % (shards * stages):
        raise MeshError(
            f"a batch of {x.shape[0]} rows does not divide over {shards} groups of devices x {stages} "
            f"stages; make it a multiple of {shards * stages}, so that each stage has a microbatch to work on"
        )
    count = stages * microbatches_per_stage(x.shape[0] // (shards * stages))

    def split(x: jax.Array) -> jax.Array:
        """[B, ...] -> [microbatches, b, ...]; no row leaves its device of the batch axes."""
        parts = x.reshape(shards, count, -1, *x.shape[1:]).swapaxes(0, 1)
        return parts.reshape(count, -1, *x.shape[1:])

    def split_label(label: jax.Array) -> jax.Array:
        if label.shape[0] == 1:
            return jnp.broadcast_to(label[None], (count, *label.shape))
        return constrain(split(label), within, None, "batch", "sequence", *[None] * (label.ndim - 2))

    def run_stage(layers: Any, queue: jax.Array, labels: Any) -> jax.Array:
        """All ticks of one stage, with its queue [microbatches / stages, b, T, D] and the labels of all."""
        waiting, stage = queue.shape[0], jax.lax.axis_index(axis)
        to_next = [(place, place + 1) for place in range(stages - 1)]
        to_previous = [(after, before) for before, after in to_next]

        def tick(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple, None]:
            x, queue = carry
            place = number % waiting
            head = queue[place]
            # In the bubble a stage works on anything finite, and nobody reads the result.
            own = jnp.clip(number - stage, 0, count - 1)
            x = apply(layers, jnp.where(stage == 0, head, x), jax.tree.map(lambda label: label[own], labels))
            taken = jax.lax.ppermute(head, axis, to_previous)
            queue = queue.at[place].set(jnp.where(stage == stages - 1, x, taken))
            return (jax.lax.ppermute(x, axis, to_next), queue), None

        carry = jnp.zeros_like(queue[0]), queue
        (_, queue), _ = jax.lax.scan(tick, carry, jnp.arange(count_ticks(stages, count)))
        # The output of the first microbatch came at tick ``stages - 1``.
        return jnp.roll(queue, -(stages - 1), axis=0)

    in_stages = jax.shard_map(
        run_stage,
        in_specs=(PartitionSpec(axis), PartitionSpec(axis), PartitionSpec()),
        out_specs=PartitionSpec(axis),
        axis_names={axis},
        # Attention's shard_map is nested in this one, and JAX cannot differentiate that where types tell over
        # which axes values vary.
        check_vma=False,
    )
    queue = constrain(split(x), within, "layer", "batch", "sequence", None)
    outputs = in_stages(layers, queue, jax.tree.map(split_label, labels))
    joined = outputs.reshape(count, shards, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    return constrain(joined, rules, "batch", "sequence", None)
