"""Settings of JAX: no compilation cache for rings of CPU devices, and no libtpu where no TPU is."""

import os
from pathlib import Path

import pytest

from tests.commands import run_python

PROGRAM = """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from agentic_ring.attention import attention
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh

jax.config.update("jax_num_cpu_devices", 2)
jax.jit(lambda x: jnp.sin(x) * 2)(jnp.ones(3))
for _ in range(2):
    {mesh}
    q = jnp.ones((1, 8, 2, 4))
    print(jax.jit(lambda q: attention(q, q, q, mesh=mesh, rules=rules))(q).shape)
"""
OURS = "mesh, rules = make_mesh(MeshShape(ring={devices}), jax.devices()[:{devices}]), ShardingRules()"
THEIRS = """mesh = jax.make_mesh((2,), ("mine",), (AxisType.Auto,))
    rules = ShardingRules(sequence=("mine",))"""


@pytest.mark.parametrize(
    ("mesh", "programs", "warnings"),
    [(OURS.format(devices=2), 1, 1), (THEIRS, 1, 1), (OURS.format(devices=1), 2, 0)],
    ids=["our mesh", "a user's mesh", "one device"],
)
def test_rings_of_cpu_devices_are_not_cached(tmp_path, mesh, programs, warnings):
    """They would come back with wrong values. What ran before the mesh was known is there, with a warning."""
    settings = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    ended = run_python("-c", PROGRAM.format(mesh=mesh), env={**os.environ, **settings})
    assert ended.stdout == "(1, 8, 2, 4)\n" * 2, ended.stderr
    assert len(list(tmp_path.glob("jit__lambda*-cache"))) == programs
    assert ended.stderr.count(f"JAX's compilation cache ({tmp_path}) is off") == warnings


@pytest.mark.parametrize(
    ("device", "chosen", "expected"),
    [(None, "", "cpu"), ("accel0", "", ""), ("vfio/0", "", ""), ("nvidia0", "", ""), (None, "tpu", "tpu")],
)
def test_libtpu_is_used_only_where_an_accelerator_is(tmp_path, device, chosen, expected):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text("")
    devices = tmp_path / "dev"
    devices.mkdir()
    if device is not None:
        (devices / device).parent.mkdir(exist_ok=True)
        (devices / device).touch()
    code = (
        "import sys, pathlib, jax; from agentic_ring.jax_settings import skip_absent_tpus; "
        "skip_absent_tpus(pathlib.Path(sys.argv[1])); print(jax.config.values['jax_platforms'] or '')"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": chosen}
    assert run_python("-c", code, devices, env=environment).stdout.strip() == expected
