"""Which mesh axes carry the batch, the sequence and the heads of one attention call."""

from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from agentic_ring.errors import ArgumentError, MeshError
from agentic_ring.mesh import ShardingRules


@dataclass(frozen=True)
class Placement:
    """Mesh axes of more than one device, by what is spread over them; all empty without a mesh.

    Attributes:
      mesh: None where there is none: everything runs on one device.
      batch: axes of the batch.
      sequence: axes of the sequence, outermost first; none where each device works on whole sequences.
      heads: axes of the query heads.
      key_heads: axes of the key heads: ``heads``, or none where all query heads share one.
    """

    mesh: Mesh | AbstractMesh | None = None
    batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    key_heads: tuple[str, ...] = ()

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
        return 1 if self.mesh is None else prod(self.mesh.shape[axis] for axis in axes)

    @property
    def queries_spec(self) -> PartitionSpec:
        """Of [B, T, N, H]."""
        return PartitionSpec(self.batch, self.sequence, self.heads, None)

    @property
    def keys_spec(self) -> PartitionSpec:
        """Of [B, S, K, H]."""
        return PartitionSpec(self.batch, self.sequence, self.key_heads, None)

    def labels_spec(self, labels: jax.Array) -> PartitionSpec:
        """Of positions or segment ids [B, T] or [1, T]."""
        return PartitionSpec(self.batch if labels.shape[0] > 1 else None, self.sequence)

    @property
    def explicit(self) -> bool:
        """Whether the mesh keeps shardings in types (``AxisType.Explicit``)."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types


def place(
    mesh: Mesh | AbstractMesh | None,
    rules: ShardingRules,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    strategy: str,
) -> Placement:
    """Places q [B, T, N, H] and k [B, S, K, H] on a mesh.

    Args:
      mesh: the mesh, or None for the one of ``jax.set_mesh``.
      rules: which of its axes carry what.
      q_shape: shape of q.
      k_shape: shape of k.
      strategy: "local" keeps sequences whole, and so does "auto" where T and S differ.

    Raises:
      MeshError: the mesh cannot be used here, has no ring although one is asked for, or does not
        divide the heads or the batch.
    """
    mesh = _usable_mesh(mesh)
    sizes = {} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1}
    batch, sequence, heads = (
        tuple(axis for axis in axes if axis in sizes) for axes in (rules.batch, rules.sequence, rules.heads)
    )
    asked = strategy not in ("auto", "local")
    if asked and (mesh is None or not set(rules.sequence) <= set(mesh.axis_names)):
        raise MeshError(
            f'strategy is "{strategy}" but the mesh has no axis {" x ".join(map(repr, rules.sequence))}: '
            "pass mesh=make_mesh(...), call inside jax.set_mesh(make_mesh(...)), or name the axis of your "
            "mesh that the sequence is sharded over: rules=ShardingRules(sequence=(...))"
        )
    if strategy == "local" or (strategy == "auto" and q_shape[1] != k_shape[1]):
        sequence = ()
    key_heads = heads if k_shape[2] > 1 else ()
    _check_divides("batch of q", q_shape[0], batch, sizes)
    _check_divides("heads of q", q_shape[2], heads, sizes)
    _check_divides("heads of k", k_shape[2], key_heads, sizes)
    return Placement(mesh, batch, sequence, heads, key_heads)


def _usable_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.manual_axes:
        raise MeshError(
            f"attention was called inside jax.shard_map over {', '.join(ambient.manual_axes)}, where "
            "arrays are one device's shards; call ring_attention(..., axis_name=...) there"
        )
    if mesh is None:
        return None if ambient.empty else ambient
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(f"mesh is a {type(mesh).__name__}; expected a jax.sharding.Mesh")
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    if not ambient.empty and abstract != ambient:
        raise MeshError(
            f"mesh is {abstract} but jax.set_mesh has set {ambient}; leave mesh out or use one mesh"
        )
    if ambient.empty and AxisType.Explicit in mesh.axis_types:
        raise MeshError("mesh has explicit axes, which work only inside jax.set_mesh(mesh); call it first")
    return mesh if ambient.empty else ambient


def _check_divides(what: str, size: int, axes: tuple[str, ...], sizes: dict[str, int]) -> None:
    devices = prod(sizes[axis] for axis in axes)
    if size % devices:
        raise MeshError(
            f"the {what} is {size}, which does not divide over the {devices} devices of the mesh axes "
            f"{' x '.join(axes)}; make it a multiple of {devices} or choose another mesh"
        )
