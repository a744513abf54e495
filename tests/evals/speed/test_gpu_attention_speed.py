"""The emulated ring computes attention, and the script runs where there is no GPU."""

import jax
import numpy as np
import pytest

from agentic_ring.attention import inverse_order, order, reference_attention
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.errors import ArgumentError
from agentic_ring.results.rows import read_rows
from evals import gpu_attention_speed as script
from evals.gpu_attention_speed import ring_on_one_device
from evals.speed import attention_benchmark
from evals.speed.attention_benchmark import Problem
from evals.speed.one_device_ring import EmulatedRing, OneCall
from tests.commands import exit_status

PROBLEM = Problem(tokens=32, heads=4, kv_heads=2, head_dim=8)
RING = 4


def test_one_call_and_the_emulated_ring_are_attention_with_its_gradients():
    q, k, v, d_output = PROBLEM.arrays(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    output, transpose = jax.vjp(reference_attention, q, k, v)
    expected = output, *transpose(d_output)
    kernel = select_kernel("vanilla")
    one_call = jax.jit(OneCall(kernel).both)(q, k, v, d_output)
    zigzag = order("zigzag", PROBLEM.tokens, RING)
    permuted = (x[:, zigzag] for x in (q, k, v, d_output))
    ring = [x[:, inverse_order(zigzag)] for x in jax.jit(EmulatedRing(kernel, RING).both)(*permuted)]
    for wanted, one, emulated in zip(expected, one_call, ring, strict=True):
        np.testing.assert_allclose(one, wanted, atol=2e-6)
        np.testing.assert_allclose(emulated, wanted, atol=2e-6)


@pytest.mark.slow
def test_the_script_runs_both_sections(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention_benchmark, "MATMUL", {"cpu": 64})
    rows_to = tmp_path / "rows.csv"
    flags = "--tokens 16 --long-tokens 32 --ring 2 --heads 2 --head-dim 8 --dtype float32 --kernel vanilla"
    flags += " --turns 1 --calls 2"
    assert exit_status(script.main, *flags.split(), "--rows-to", rows_to) == 0
    assert "time / bare kernel" in capsys.readouterr().out
    rows = [(row["tokens"], row["contender"]) for row in read_rows(rows_to)]
    names = ("bare kernel", "ours local", "emulated ring of 2")
    assert rows[::2] == [*(("16", name) for name in names), ("32", "ours local")]


def test_a_kernel_of_another_platform_and_odd_lengths_are_errors():
    with pytest.raises(ArgumentError, match="cudnn"):
        ring_on_one_device("cudnn", devices=8, tokens=1024)
    with pytest.raises(ArgumentError, match="tokens is 24, which does not divide over a zigzag ring of 8"):
        ring_on_one_device("xla", devices=8, tokens=24)
