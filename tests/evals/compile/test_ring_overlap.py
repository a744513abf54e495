"""Overlap of transfers with compute, in the text of a schedule and in compiled ring attention."""

import pytest
from evals.compile.compile_target import CompilerMissingError, compile_target

from evals.compile.collective_schedule import exposed, parse, transfers
from evals.ring_overlap import AttentionProblem

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%product (a: bf16[8,8], b: bf16[8,8]) -> f32[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = bf16[8,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
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
  %moved = f32[8,8]{1,0} custom-call(%block), custom_call_target="AllocateBuffer"
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


def test_what_stands_between_start_and_done():
    home, halves, send = transfers(PROGRAM)
    assert (send.times, send.matmuls, send.backward, send.cycle) == (3, 2, False, 4)
    assert (send.array, send.size) == ("bf16[2,8,8]", 256)
    assert send.meanwhile == {"fusion": 1, "custom-call": 2}
    assert (home.times, home.hidden, home.backward, home.cycle) == (1, False, True, 4)
    assert (halves.hidden, halves.cycle) == (False, 0)
    assert [transfer.name for transfer in exposed(PROGRAM, ring=4)] == ["home"]


def test_products_in_a_loop_count_as_often_as_it_runs():
    program = parse(PROGRAM)
    loop = next(step for step in program.computations["main"] if step.opcode == "while")
    assert program.trips(loop) == 3
    assert program.matmuls(loop) == 6


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["2x2", "4x4"])
def test_every_hop_on_a_tpu_overlaps_compute(topology):
    """Except the final transfer of dK and dV, after which nothing is left to compute."""
    try:
        target = compile_target("v5e", topology)
    except CompilerMissingError as error:
        pytest.skip(str(error))
    ring = len(target.devices)
    text = AttentionProblem(16 * 1024, ring, heads=4, key_heads=2).compile(target).as_text()
    hops = [transfer for transfer in transfers(text) if transfer.cycle == ring]
    assert sum(hop.times for hop in hops if not hop.backward) >= ring - 1
    late = exposed(text, ring)
    assert all(transfer.backward and transfer.times == 1 for transfer in late)
    assert len(late) <= 1
