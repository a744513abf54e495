"""Collectives of a training step, from the text of a schedule and from a compiled step."""

import jax
import pytest

from evals.compile import llama_step
from evals.compile.llama_step import LlamaStep, Shape
from evals.step_overlap import collective_totals

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%product (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%scatter (b: f32[64,8]) -> f32[8,8] {
  %b = f32[64,8]{1,0} parameter(0)
  ROOT %rs = f32[8,8]{1,0} reduce-scatter(%b), dimensions={0}, metadata={op_name="jit(f)/transpose(jvp(g))"}
}

%condition (state: (s32[], f32[8,8])) -> pred[] {
  %state = (s32[], f32[8,8]{1,0}) parameter(0)
  %limit = s32[] constant(5)
  %count = s32[] get-tuple-element(%state), index=0
  ROOT %below = pred[] compare(%count, %limit), direction=LT
}

%body (state.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%state.1), index=1
  %gather = (f32[8,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%x), dimensions={0}
  %scores = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%product
  %gathered = f32[64,8]{1,0} all-gather-done(%gather)
  %sum = f32[8,8]{1,0} all-reduce(%scores), to_apply=%add
  ROOT %next = (s32[], f32[8,8]{1,0}) tuple(%count, %sum)
}

ENTRY %main (x.1: (s32[], f32[8,8])) -> f32[8,8] {
  %x.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %loop = (s32[], f32[8,8]{1,0}) while(%x.1), condition=%condition, body=%body
  %gradient = ((f32[64,8]{1,0}), f32[8,8]{1,0}) async-start(%loop), calls=%scatter
  ROOT %mine = f32[8,8]{1,0} async-done(%gradient)
}
"""


def test_hidden_and_exposed():
    gather, reduce, scatter = collective_totals(PROGRAM, smallest=0)
    assert (gather.kind, gather.count, gather.exposed_count, gather.size) == ("all-gather", 5, 0, 5 * 256)
    assert (reduce.kind, reduce.count, reduce.exposed_count) == ("all-reduce", 5, 5)
    assert (scatter.kind, scatter.backward, scatter.exposed_size) == ("reduce-scatter", True, 256)


def test_small_arrays_are_left_out():
    assert collective_totals(PROGRAM, smallest=257) == []


@pytest.mark.slow
def test_a_real_step_sends_a_ring_and_its_weights(monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", Shape(64, 128, 2, 8, vocab_size=128))
    monkeypatch.setattr(llama_step, "CHUNK", 8)
    devices = tuple(jax.devices())
    compiled = LlamaStep("tiny", "ring", 512, devices, "float32").train_step.lower().compile()
    totals = {
        (total.kind, total.backward): total
        for total in collective_totals(compiled.as_text() or "", smallest=256)
    }
    hops = sum(total.count for (kind, _), total in totals.items() if kind == "collective-permute")
    # Forward, recomputed forward and backward of 2 layers of 8 groups: 7 hops of keys and values each.
    assert hops >= 2 * 8 * 7 * 3
    assert any(kind == "reduce-scatter" and backward for kind, backward in totals)
