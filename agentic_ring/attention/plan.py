"""Plans one call of ``attention``, before anything is computed, and runs it as planned.

A plan is the mesh axes, the strategy, the layout and the kernel.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from agentic_ring.attention.choose_strategy import Choice, Shapes, choose_strategy, refusal, ulysses_degree
from agentic_ring.attention.inputs import AttentionInputs, AttentionOptions
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.layout import balanced_layout, chunk_run, padded_length
from agentic_ring.attention.strategies import ShardedAttention
from agentic_ring.errors import ArgumentError, MeshError
from agentic_ring.mesh import ShardingRules, check_divides, mesh_platform, shared_axes


@dataclass(frozen=True)
class Placement:
    """Mesh axes of more than one device, by what is spread over them; all empty without a mesh."""

    mesh: Mesh | AbstractMesh | None
    """None where everything runs on one device."""
    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    """Outermost first; none where each device works on whole sequences."""
    heads: tuple[str, ...]
    key_heads: tuple[str, ...]
    """``heads``, or none where all query heads share one key head."""

    @property
    def ring(self) -> int:
        """Devices that share a sequence."""
        return self._devices(self.sequence)

    @property
    def inner(self) -> int:
        """Those of them that lie on the innermost axis."""
        return self._devices(self.sequence[-1:])

    def local(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(rows, heads, key heads) that a device holds of queries and keys of these sizes [B, N, K]."""
        sizes = zip(shape, (self.batch, self.heads, self.key_heads), strict=True)
        rows, heads, key_heads = (size // self._devices(axes) for size, axes in sizes)
        return rows, heads, key_heads

    def _devices(self, axes: tuple[str, ...]) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def queries_spec(self) -> PartitionSpec:
        """The PartitionSpec of queries [B, T, N, H]."""
        return PartitionSpec(self.batch, self.sequence, self.heads, None)

    def input_specs(self, inputs: AttentionInputs) -> Any:
        """The PartitionSpec of every array of these inputs, in its place in ``AttentionInputs``."""

        def labels_spec(labels: jax.Array) -> PartitionSpec:
            return PartitionSpec(self.batch if labels.shape[0] > 1 else None, self.sequence)

        keys_spec = PartitionSpec(self.batch, self.sequence, self.key_heads, None)
        specs: dict[str, Any] = {
            "q": self.queries_spec,
            "k": keys_spec,
            "v": keys_spec,
            **{name: PartitionSpec(self.heads) for name in ("sinks", "slopes", "windows")},
            "expansion": jax.tree.map(lambda _: PartitionSpec(None, self.heads), inputs.expansion),
            "query": jax.tree.map(labels_spec, inputs.query),
            "key": jax.tree.map(labels_spec, inputs.key),
            "dropout_key": PartitionSpec(),
        }
        specs |= {name: None for name in specs if getattr(inputs, name) is None}
        return AttentionInputs(**specs)

    @property
    def explicit(self) -> bool:
        """Whether the mesh keeps shardings in types (``AxisType.Explicit``)."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types


@dataclass(frozen=True)
class Plan:
    """The static plan of one call: which mesh axes carry what, and what runs on each device."""

    placement: Placement
    sharded: ShardedAttention

    def padded(self, length: int) -> int:
        """The length that spreads evenly over the devices in this layout and schedule."""
        sharded, ring = self.sharded, self.placement.ring
        options = {"schedule": sharded.options.schedule, "permuted": sharded.options.permuted}
        return padded_length(length, ring, sharded.layout, ulysses=sharded.ulysses, **options)

    def check_permuted(self, rules: ShardingRules, *lengths: int) -> None:
        """Checks that a permuted sequence is shared by all devices of the ring, and padded for them."""
        mesh, ring, layout = self.placement.mesh, self.placement.ring, self.sharded.layout
        devices = 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in rules.sequence)
        if devices != ring and layout != "contiguous":
            raise ArgumentError(
                f"permuted=True says that the sequence lies in {layout} order over {devices} devices, but "
                "each works on whole sequences here (strategy local); pass positions, or another strategy"
            )
        for length in lengths:
            if ring > 1 and self.padded(length) != length:
                schedule = self.sharded.options.schedule
                needed = padded_length(length, ring, layout, schedule=schedule)
                raise ArgumentError(
                    f"permuted=True with {length} tokens, which do not spread evenly over {ring} devices in "
                    f"{layout} order; pad them to {needed} before permuting "
                    f"(agentic_ring.attention.padded_length({length}, {ring}, {layout!r}, {schedule=}))"
                )


@dataclass(frozen=True)
class Decision:
    """A plan for a platform ("cpu", "gpu" or "tpu"), and the reasons for it."""

    plan: Plan
    shapes: Shapes
    platform: str
    choice: Choice


def decide(
    inputs: AttentionInputs, options: AttentionOptions, mesh: Mesh | AbstractMesh | None, rules: ShardingRules
) -> Decision:
    """Decides how a call runs, with the arguments and errors of ``attention``.

    Only shapes and dtypes of the inputs matter.
    """
    q, k, mask = inputs.q, inputs.k, options.mask
    placement = _place(q, k, options.strategy, mesh, rules)
    platform = mesh_platform(placement.mesh)
    rows, heads, key_heads = placement.local((q.shape[0], q.shape[2], k.shape[2]))
    permuted = options.permuted and options.layout not in ("auto", "contiguous")
    shapes = Shapes(
        ring=placement.ring,
        inner=placement.inner,
        batch=rows,
        tokens=-(-q.shape[1] // placement.ring),
        heads=heads,
        key_heads=key_heads,
        head_dim=q.shape[3],
        itemsize=q.dtype.itemsize,
        permuted=permuted and inputs.query.positions is None,
    )
    asked = options.strategy
    choice = choose_strategy(shapes, mask, platform) if asked == "auto" else Choice(asked, "asked for")
    if (why := refusal(shapes, choice.strategy)) is not None:
        raise MeshError(f'strategy is "{choice.strategy}" but {why}; choose another strategy or mesh')
    layout = options.layout
    if layout == "auto":
        layout = "contiguous"
        if shapes.ring > 1 and not options.permuted and inputs.query.positions is None:
            labels = inputs.query.segment_ids is not None or inputs.key.hidden is not None
            layout = balanced_layout(mask, labels, shapes.ring, shapes.tokens, platform)
    sharded = ShardedAttention(
        replace(options, strategy=choice.strategy, layout=layout),
        select_kernel(options.kernel, options.query_chunk, options.key_chunk, platform),
        inner=placement.inner if choice.strategy == "ring" and placement.inner < placement.ring else 1,
        ulysses=ulysses_degree(shapes, choice.strategy),
    )
    plan = Plan(placement, sharded)
    ring = placement.ring if options.permuted else placement.ring // sharded.ulysses
    if q.shape[1] == k.shape[1] and (run := chunk_run(layout, plan.padded(q.shape[1]) // ring, ring)):
        kernel = select_kernel(options.kernel, options.query_chunk, options.key_chunk, platform, run)
        plan = replace(plan, sharded=replace(sharded, kernel=kernel))
    if options.permuted:
        plan.check_permuted(rules, q.shape[1], k.shape[1])
    return Decision(plan, shapes, platform, choice)


def _place(
    q: jax.Array, k: jax.Array, strategy: str, mesh: Mesh | AbstractMesh | None, rules: ShardingRules
) -> Placement:
    """Sequences stay whole under the strategy "local", and under "auto" where q and k differ in length."""
    mesh = _usable_mesh(mesh, rules)
    sizes = {} if mesh is None else shared_axes(mesh)
    batch, sequence, heads = (
        tuple(axis for axis in axes if axis in sizes) for axes in (rules.batch, rules.sequence, rules.heads)
    )
    names = () if mesh is None else mesh.axis_names
    if strategy not in ("auto", "local") and not set(rules.sequence) <= set(names):
        raise MeshError(
            f'strategy is "{strategy}" but the mesh has no axis {" x ".join(map(repr, rules.sequence))}: '
            "pass mesh=make_mesh(...), call inside jax.set_mesh(make_mesh(...)), or name the axis of your "
            "mesh that the sequence is sharded over: rules=ShardingRules(sequence=(...))"
        )
    if strategy == "local" or (strategy == "auto" and q.shape[1] != k.shape[1]):
        sequence = ()
    key_heads = ShardingRules(heads=heads).of_keys(k.shape[2]).heads
    for what, size, axes in (
        ("batch of q", q.shape[0], batch),
        ("heads of q", q.shape[2], heads),
        ("heads of k", k.shape[2], key_heads),
    ):
        check_divides(what, size, math.prod(sizes[axis] for axis in axes), axes)
    return Placement(mesh, batch, sequence, heads, key_heads)


def _usable_mesh(mesh: Mesh | AbstractMesh | None, rules: ShardingRules) -> Mesh | AbstractMesh | None:
    ambient = jax.sharding.get_abstract_mesh()
    manual = set(ambient.manual_axes)
    if manual == set(ambient.axis_names) != set() or manual & {*rules.sequence, *rules.heads}:
        raise MeshError(
            f"attention was called inside jax.shard_map over {', '.join(ambient.manual_axes)}, where "
            "arrays are one device's shards; call ring_attention(..., axis_name=...) there"
        )
    if mesh is None:
        return None if ambient.empty else ambient
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(f"mesh is a {type(mesh).__name__}; expected a jax.sharding.Mesh")
    abstract = mesh.abstract_mesh
    same = abstract.shape_tuple == ambient.shape_tuple if manual else abstract == ambient
    if not ambient.empty and not same:
        raise MeshError(
            f"mesh is {abstract} but jax.set_mesh has set {ambient}; leave mesh out or use one mesh"
        )
    if ambient.empty and AxisType.Explicit in mesh.axis_types:
        raise MeshError("mesh has explicit axes, which work only inside jax.set_mesh(mesh); call it first")
    return mesh if ambient.empty else ambient


@functools.partial(jax.jit, static_argnums=0)
def run(plan: Plan, inputs: AttentionInputs) -> jax.Array:
    """Runs a planned call: pads the inputs, shards them over the mesh, attends, and undoes both.

    Under jit, so that the layers of a model share one trace and a call outside jit runs as one program.
    """
    if not plan.placement.explicit:
        return _run_sharded(plan, inputs)
    # What follows leaves shardings to the compiler, so the explicit axes are automatic for a while.
    sharding: Any = jax.typeof(inputs.q).sharding
    if plan.sharded.options.return_logsumexp:
        sharding = sharding, sharding.update(spec=PartitionSpec(*sharding.spec[:3]))
    run: Any = jax.sharding.auto_axes(functools.partial(_run_sharded, plan), out_sharding=sharding)
    return run(inputs)


def _run_sharded(plan: Plan, inputs: AttentionInputs) -> jax.Array:
    place = plan.placement
    if place.mesh is None:
        return _run_on_device(plan, inputs)
    length = inputs.q.shape[1]
    inputs = _padded(plan, inputs)
    spec, both = place.queries_spec, plan.sharded.options.return_logsumexp
    output = jax.shard_map(
        functools.partial(_run_on_device, plan),
        mesh=place.mesh if isinstance(place.mesh, Mesh) else None,  # an abstract mesh is the ambient one
        in_specs=(place.input_specs(inputs),),
        out_specs=(spec, PartitionSpec(*spec[:3])) if both else spec,
    )(inputs)
    return jax.tree.map(lambda x: x[:, :length] if length != inputs.q.shape[1] else x, output)


def _run_on_device(plan: Plan, inputs: AttentionInputs) -> jax.Array:
    place = plan.placement

    def first(axes: tuple[str, ...], size: int) -> jax.Array:
        return jnp.int32(jax.lax.axis_index(axes) * size if axes else 0)

    first_row, first_head = first(place.batch, inputs.q.shape[0]), first(place.heads, inputs.q.shape[2])
    state = plan.sharded.attend_whole_sequence(RingAxis.over(place.sequence), inputs, first_row, first_head)
    return tuple(state) if plan.sharded.options.return_logsumexp else state.output  # pyright: ignore[reportReturnType]


def _padded(plan: Plan, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with padding tokens at the end, so that both lengths spread evenly over the devices."""
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    q_padding, k_padding = plan.padded(queries) - queries, plan.padded(keys) - keys
    query, key, mask = inputs.query, inputs.key, plan.sharded.options.mask
    counted = query.positions is None and queries == keys
    padding_is_later = counted and mask.causal and mask.prefix <= queries  # no query would attend to it
    if k_padding and not padding_is_later and query.positions is None and query.segment_ids is None:
        # Only labels can be padded: one segment for all tokens.
        query, key = (
            replace(labels, segment_ids=jnp.zeros((1, length), jnp.int32))
            for labels, length in ((query, queries), (key, keys))
        )

    def pad(x: jax.Array, amount: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, amount), (0, 0), (0, 0))) if amount else x

    arrays = {"q": pad(inputs.q, q_padding), "k": pad(inputs.k, k_padding), "v": pad(inputs.v, k_padding)}
    return replace(inputs, **arrays, query=query.pad(q_padding), key=key.pad(k_padding))
