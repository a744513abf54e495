"""Settings of JAX: no compilation cache for rings of CPU devices, and no libtpu where no TPU is."""

import os

import jax
import pytest

from agentic_ring.jax_settings import skip_absent_tpus
from tests.commands import run_python

PROGRAM = """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from agentic_ring.attention import attention
from agentic_ring.mesh import ShardingRules

jax.config.update("jax_num_cpu_devices", 2)
q = jnp.ones((1, 8, 2, 4))
for devices in (1, 2, 2):
    mesh = jax.make_mesh((devices,), ("mine",), (AxisType.Auto,), devices=jax.devices()[:devices])
    run = jax.jit(lambda q: attention(q, q, q, mesh=mesh, rules=ShardingRules(sequence=("mine",))))
    print(run(q).shape)
"""


def test_rings_of_cpu_devices_are_not_cached(tmp_path):
    """They would come back with wrong values. What one device ran before is there, with a warning."""
    settings = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    ended = run_python("-c", PROGRAM, env={**os.environ, **settings})
    assert ended.stdout == "(1, 8, 2, 4)\n" * 3, ended.stderr
    assert len(list(tmp_path.glob("jit__lambda*-cache"))) == 1
    assert ended.stderr.count(f"JAX's compilation cache ({tmp_path}) is off") == 1


@pytest.mark.parametrize(
    ("device", "chosen", "expected"),
    [(None, "", "cpu"), ("accel0", "", ""), ("vfio/0", "", ""), ("nvidia0", "", ""), (None, "tpu", "tpu")],
)
def test_libtpu_is_used_only_where_an_accelerator_is(tmp_path, monkeypatch, device, chosen, expected):
    before = jax.config.values["jax_platforms"]
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if device is not None:
        (tmp_path / "dev" / device).parent.mkdir(parents=True)
        (tmp_path / "dev" / device).touch()
    try:
        jax.config.update("jax_platforms", chosen)
        skip_absent_tpus(tmp_path / "dev")
        assert (jax.config.values["jax_platforms"] or "") == expected
    finally:
        jax.config.update("jax_platforms", before)
