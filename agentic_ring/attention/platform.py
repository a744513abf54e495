"""Platform and device kind of a mesh, also of an abstract one."""

import jax
from jax.sharding import AbstractMesh, Mesh


def mesh_platform(mesh: Mesh | AbstractMesh | None = None) -> str:
    """One of "cpu", "gpu" and "tpu".

    Args:
      mesh: the mesh, or None for the one of ``jax.set_mesh`` and ``jax.shard_map``.
    """
    name, _ = _device(mesh)
    return "gpu" if name in ("cuda", "rocm") else name


def mesh_device_kind(mesh: Mesh | AbstractMesh | None = None) -> str:
    """JAX's name of the devices, such as "TPU v3"; the mesh as in ``mesh_platform``."""
    return _device(mesh)[1]


def _device(mesh: Mesh | AbstractMesh | None) -> tuple[str, str]:
    """(platform, kind)."""
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
    else:
        device = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).abstract_device
        device = jax.devices()[0] if device is None else device
    return device.platform, device.device_kind
