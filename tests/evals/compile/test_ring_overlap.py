"""Overlap of a ring's transfers with compute, in the text of a schedule and in a program for a TPU."""

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.attention import attention
from agentic_ring.mesh import MeshShape, make_mesh
from evals.compile.machines import CompilerMissingError, compile_target
from tests.compiled_schedule import Hop, hops, parse

SCHEDULE = """\
%product (a: bf16[8,8]) -> f32[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (state: (s32[], bf16[2,8,8])) -> pred[] {
  %state = (s32[], bf16[2,8,8]{2,1,0}) parameter(0)
  %limit = s32[] constant(3)
  %count = s32[] get-tuple-element(%state), index=0
  ROOT %below = pred[] compare(%count, %limit), direction=LT
}

%body (state.1: (s32[], bf16[2,8,8])) -> (s32[], bf16[2,8,8]) {
  %state.1 = (s32[], bf16[2,8,8]{2,1,0}) parameter(0)
  %block = bf16[2,8,8]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state.1), index=1
  %send = (bf16[2,8,8]{2,1,0:T(8,128)(2,1)}, bf16[2,8,8]{2,1,0}, u32[]) collective-permute-start(%block), \
channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, metadata={op_name="jit(f)/ppermute"}
  %scores = f32[8,8]{1,0} fusion(%block, %block), kind=kOutput, calls=%product
  %kernel = f32[8,8]{1,0} custom-call(%block), custom_call_target="tpu_custom_call"
  %arrived = bf16[2,8,8]{2,1,0} collective-permute-done(%send)
  ROOT %next = (s32[], bf16[2,8,8]{2,1,0}) tuple(%count, %arrived)
}

ENTRY %main (x: (s32[], bf16[2,8,8])) -> f32[2,8,8] {
  %x = (s32[], bf16[2,8,8]{2,1,0}) parameter(0)
  %loop = (s32[], bf16[2,8,8]{2,1,0}) while(%x), condition=%condition, body=%body
  %home = (f32[2,8,8]{2,1,0}, f32[2,8,8]{2,1,0}) collective-permute-start(%loop), \
source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, metadata={op_name="jit(f)/transpose(jvp(g))/ppermute"}
  %came = f32[2,8,8]{2,1,0} collective-permute-done(%home)
  ROOT %halves = f32[2,8,8]{2,1,0} collective-permute(%came), source_target_pairs={{0,0},{1,2},{2,3},{3,1}}
}
"""


def test_what_a_schedule_runs_while_an_array_travels():
    late, overlapped = hops(parse(SCHEDULE), ring=4)
    assert late == Hop(times=1, backward=True, floats=True, products=0)
    assert overlapped == Hop(times=3, backward=False, floats=True, products=2)


@pytest.mark.slow
def test_every_hop_on_a_tpu_overlaps_compute():
    """Except the final transfer of dK and dV, after which nothing is left to compute."""
    try:
        target = compile_target("v5e", "4x4")
    except CompilerMissingError as error:
        pytest.skip(str(error))
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
