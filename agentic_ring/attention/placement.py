"""Which mesh axes carry the batch, the sequence and the heads of one attention call."""

from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from agentic_ring.errors import ArgumentError, MeshError
from agentic_ring.mesh import ShardingRules

_RULES = ShardingRules()


@dataclass(frozen=True)
class Placement:
    """Mesh axes of more than one device, by what is spread over them; all empty without a mesh.

    Attributes:
      mesh: None where there is none: everything runs on one device.
      batch: axes of the batch.
      sequence: the axis of the ring, None where each device works on whole sequences.
      heads: axes of the query heads.
      key_heads: axes of the key heads: ``heads``, or none where all query heads share one.
    """

    mesh: Mesh | AbstractMesh | None = None
    batch: tuple[str, ...] = ()
    sequence: str | None = None
    heads: tuple[str, ...] = ()
    key_heads: tuple[str, ...] = ()

    @property
    def ring(self) -> int:
        """Devices that share a sequence."""
        return 1 if self.mesh is None or self.sequence is None else self.mesh.shape[self.sequence]

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
    mesh: Mesh | AbstractMesh | None, q_shape: tuple[int, ...], k_shape: tuple[int, ...], ring: bool | None
) -> Placement:
    """Places q [B, T, N, H] and k [B, S, K, H] on a mesh.

    Args:
      mesh: the mesh, or None for the one of ``jax.set_mesh``.
      q_shape: shape of q.
      k_shape: shape of k.
      ring: whether to shard the sequence; None: where the mesh has a ring and T = S.

    Raises:
      MeshError: the mesh cannot be used here, has no ring although one is asked for, or does not
        divide the heads.
      ArgumentError: the mesh does not divide the batch.
    """
    mesh = _usable_mesh(mesh)
    sizes = {} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1}
    batch, sequence, heads = (
        tuple(axis for axis in axes if axis in sizes)
        for axes in (_RULES.batch, _RULES.sequence, _RULES.heads)
    )
    if ring and (mesh is None or not set(_RULES.sequence) <= set(mesh.axis_names)):
        raise MeshError(
            f'strategy is "ring" but the mesh has no axis {_RULES.sequence[0]!r}: pass mesh=make_mesh(...), '
            "or call inside jax.set_mesh(make_mesh(...))"
        )
    if ring is None:
        ring = q_shape[1] == k_shape[1]
    key_heads = heads if k_shape[2] > 1 else ()
    _check_divides("batch of q", q_shape[0], batch, sizes)
    _check_divides("heads of q", q_shape[2], heads, sizes)
    _check_divides("heads of k", k_shape[2], key_heads, sizes)
    return Placement(mesh, batch, sequence[0] if ring and sequence else None, heads, key_heads)


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
