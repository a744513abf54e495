"""Overlap of a ring's transfers with compute in a program for a TPU."""

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.attention import attention
from agentic_ring.mesh import MeshShape, make_mesh
from evals.compile.machines import HARDWARE, compile_target
from tests.compiled_schedule import hops, parse


@pytest.mark.slow
def test_every_hop_on_a_tpu_overlaps_compute():
    """Except the final transfer of dK and dV, after which nothing is left to compute."""
    if not HARDWARE["v5e"].compiler_installed:
        pytest.skip("needs the extra aot")
    target = compile_target(HARDWARE["v5e"], "4x4")
    ring = len(target.devices)
    mesh = make_mesh(MeshShape(ring=ring), devices=target.devices)
    sequence = jax.NamedSharding(mesh, jax.P(None, "ring"))
    q, k = (
        jax.ShapeDtypeStruct((1, 16 * 1024, heads, 128), jnp.bfloat16, sharding=sequence) for heads in (4, 2)
    )

    def both(q, k, v, d_output):
        output, transpose = jax.vjp(lambda q, k, v: attention(q, k, v, mesh=mesh, strategy="ring"), q, k, v)
        return output, transpose(d_output)

    found = list(hops(parse(target.compile(jax.jit(both).lower(q, k, k, q)).as_text()), ring))
    assert sum(hop.times for hop in found if not hop.backward) >= ring - 1
    late = [hop for hop in found if hop.floats and not hop.products]
    assert len(late) <= 1
    assert all(hop.backward and hop.times == 1 for hop in late)
