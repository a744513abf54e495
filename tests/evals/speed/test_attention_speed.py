"""Counts, ratios, rows and plots of the attention benchmark; no test asserts a time."""

import jax
import numpy as np
import pytest

from agentic_ring import device_memory
from agentic_ring.errors import ArgumentError, DataError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.results.rows import read_rows
from evals import attention_speed as script
from evals.attention_speed import LOCAL, attention_speed
from evals.speed import attention_benchmark
from evals.speed.attention_benchmark import Implementation, Problem, UnsupportedError, benchmark
from evals.speed.attention_speed_plot import plot_speed
from evals.speed.interleaved import Spread, time_interleaved
from evals.speed.peers import peer
from tests.commands import exit_status

TINY = Problem(tokens=16, heads=2, kv_heads=1, head_dim=8)
PRODUCT = Implementation.of("product", lambda q, k, v: q * (k + v))


@pytest.fixture(autouse=True)
def small_reference_product(monkeypatch):
    monkeypatch.setattr(attention_benchmark, "MATMUL", {"cpu": 64})


def test_rows_of_our_own_implementations():
    strategies = ("ring", "ulysses_ring")  # two heads do not divide over a part of a ring of two
    rows, (line,) = attention_speed(
        TINY, devices=2, strategies=strategies, peers=(), kernel="vanilla", turns=1
    )
    assert [(row.contender, row.direction) for row in rows] == [
        (name, direction) for name in ("ours ring", LOCAL) for direction in ("forward", "forward+backward")
    ]
    assert line.startswith('ours ulysses_ring: strategy is "ulysses_ring" but 2 query and 1 key heads')
    assert line.endswith("(forward, forward+backward)")
    for row in rows:
        assert row.devices == (1 if row.contender == LOCAL else 2)
        assert set(row.ratios) == (set() if row.contender == LOCAL else {LOCAL})
        assert row.flop_rate == pytest.approx(TINY.flops(row.direction) / row.seconds.median)
        assert row.share_of_matmul.median == pytest.approx(row.flop_rate / row.matmul_rate)
        assert row.temp_bytes > 0


def test_operations_are_those_of_a_causal_mask():
    problem = Problem(tokens=1000, heads=3, kv_heads=1, head_dim=16)
    # Two products of 2 T T H operations a head, half of the pairs; then five more of them.
    assert problem.flops("forward") == 2 * 2 * 1000 * 1000 * 16 * 3 / 2
    assert problem.flops("forward+backward") == (2 + 5) * 2 * 1000 * 1000 * 16 * 3 / 2


def test_both_is_the_forward_with_its_gradients():
    q, k, v, d_output = TINY.arrays(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    output, dq, dk, dv = PRODUCT.both(q, k, v, d_output)
    np.testing.assert_allclose(output, PRODUCT.forward(q, k, v))
    np.testing.assert_allclose(dq, d_output * (k + v), rtol=1e-6)
    np.testing.assert_allclose(dk, dv)
    np.testing.assert_allclose(dk.sum(), (d_output * q).sum(), rtol=1e-4)


def test_what_does_not_fit_is_left_out_before_it_runs(monkeypatch):
    monkeypatch.setattr(device_memory, "HOST_SHARE", 1e-9)
    rows, (line,) = benchmark(TINY, [PRODUCT], (), rounds=1)
    assert rows == []
    assert line == "product: needs 0.0 GB of 0.0 GB (forward, forward+backward)"


def test_ratios_are_of_the_same_round():
    rows, _ = benchmark(
        TINY, [PRODUCT, Implementation.of("sum", lambda q, k, v: q + k + v)], ("sum",), rounds=3
    )
    product, total = (row for row in rows if row.direction == "forward")
    assert total.ratios == {}
    ratio = product.ratios["sum"]
    assert product.seconds.low / total.seconds.high <= ratio.low <= ratio.median <= ratio.high
    assert product.turns == 3


def test_functions_are_timed_interleaved_after_a_warm_up():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    calls = []
    first, second = time_interleaved(2, lambda: calls.append("a"), lambda: calls.append("b"), calls=2)
    assert calls == ["a", "a", "b", "b"] * 3
    assert len(first) == len(second) == 2


def test_the_script_writes_rows_and_draws_them(tmp_path, monkeypatch, capsys):
    rows_to, plot = tmp_path / "speed.csv", tmp_path / "speed.png"
    flags = "--tokens 16 --devices 1 --heads 2 --head-dim 8 --kernel vanilla --turns 1"
    flags += " --strategies --peers jax.nn"
    monkeypatch.setattr(script, "simulate_cpu_devices", lambda devices: None)  # there are eight already
    assert exit_status(script.main, *flags.split(), "--rows-to", rows_to, "--plot", plot) == 0
    assert "time / jax.nn" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = read_rows(rows_to)
    assert {row["tokens"] for row in rows} == {"16"}
    local = next(row for row in rows if row["contender"] == LOCAL)
    assert float(local["seconds_low"]) <= float(local["seconds"]) <= float(local["seconds_high"])
    assert float(local["ratio_to_jax.nn"]) > 0
    assert local["command"]
    assert local["commit"]
    assert "cores" in local["hardware"]
    plot_speed(tmp_path / "again.png", read_rows(rows_to), "forward")
    assert (tmp_path / "again.png").exists()


def test_an_unknown_peer_is_an_error_that_lists_the_peers():
    with pytest.raises(
        UnknownNameError, match=r"unknown peer 'flash'; choose one of: jax\.nn, ringattention"
    ):
        attention_speed(TINY, devices=2, peers=("flash",))


def test_an_unsupported_problem_is_left_out_with_the_reason():
    # Either the package is missing, or it has no grouped heads.
    mesh = make_mesh(MeshShape(ring=2), jax.devices()[:2])
    with pytest.raises(UnsupportedError, match=r"cannot be imported|has no grouped heads, here 2 on 1"):
        peer("ringattention", TINY, mesh)


def test_wrong_sizes_are_errors():
    with pytest.raises(ArgumentError, match="tokens is 63, which does not divide over 2 devices"):
        attention_speed(Problem(63), devices=2, peers=())
    with pytest.raises(ArgumentError, match="heads is 3, no multiple of kv_heads 2"):
        Problem(64, heads=3, kv_heads=2)
    with pytest.raises(ArgumentError, match="turns is 0"):
        benchmark(TINY, [PRODUCT], (), rounds=0)


def test_without_rows_there_is_nothing_to_draw(tmp_path):
    with pytest.raises(DataError, match="does not exist; measure first"):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(ArgumentError, match="nothing to draw"):
        plot_speed(tmp_path / "plot.png", [])
