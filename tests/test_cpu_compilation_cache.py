"""Rings of CPU devices stay out of JAX's compilation cache, from which they come back with wrong values."""

import os
import subprocess

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


def run(mesh: str, cache: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    ended = run_python("-c", PROGRAM.format(mesh=mesh), env={**os.environ, **settings})
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.parametrize("mesh", [OURS.format(devices=2), THEIRS], ids=["our mesh", "a user's mesh"])
def test_a_ring_of_cpu_devices_is_not_cached(tmp_path, mesh):
    """Only what ran before the mesh was known is there, and one warning says so."""
    ended = run(mesh, str(tmp_path))
    assert ended.stdout == "(1, 8, 2, 4)\n" * 2
    assert len(list(tmp_path.glob("jit__lambda*-cache"))) == 1
    assert ended.stderr.count("RuntimeWarning") == 1
    assert f"JAX's compilation cache ({tmp_path}) is off" in ended.stderr


def test_one_device_keeps_the_cache(tmp_path):
    ended = run(OURS.format(devices=1), str(tmp_path))
    assert "RuntimeWarning" not in ended.stderr
    assert len(list(tmp_path.glob("jit__lambda*-cache"))) == 2
