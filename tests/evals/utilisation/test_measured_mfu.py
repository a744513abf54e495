"""Utilisation and rates computed from fixed seconds; steps that run on simulated devices."""

from statistics import median
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from agentic_ring.attention import order
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.results import timing
from agentic_ring.results.rows import write_rows
from agentic_ring.results.timing import Spread
from evals.compile import llama_step
from evals.compile.llama_step import LlamaStep
from evals.utilisation import measured_mfu
from evals.utilisation.measured_mfu import known_peak, measure, random_text, updates
from evals.utilisation.projection import Step, project, read_rates


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", llama_step.Shape(32, 48, 1, 4))
    return lambda method, context: LlamaStep("tiny", method, context, tuple(jax.devices()), "float32")


def test_utilisation_and_expectation_are_of_the_same_turn(tiny, monkeypatch, tmp_path):
    """Steps of fixed seconds per round, of 2000, 4000 and 8000 operations per second at most."""
    seconds = [[0.5, 0.25, 0.125], [2.0, 4.0, 8.0], [0.5, 0.25, 0.125], [10.0, 10.0, 20.0]]
    monkeypatch.setattr(measured_mfu, "_times", lambda makers, turns: seconds)
    monkeypatch.setattr(timing, "MATMUL", {"cpu": 10 / 2 ** (1 / 3)})
    steps = [tiny("blockwise", 64), tiny("ring", 512)]
    (blockwise, ring), rates = measure(steps, turns=3)
    assert (ring["ring"], ring["devices"], ring["itemsize"]) == (8, 8, 4)
    # One processor that all simulated devices share.
    turns = zip((2.0, 4.0, 8.0), (2000, 4000, 8000), strict=True)
    shares = [blockwise["flops_halved"] / seconds / peak for seconds, peak in turns]
    assert blockwise["mfu_halved"] == pytest.approx(median(shares))
    assert ring["mfu_model_high"] == pytest.approx(ring["flops_model"] / 10.0 / 2000)
    assert ring["tokens_a_second"] == 512 / 10.0
    more = ring["flops_model"] / blockwise["flops_model"]
    expected = Spread.of(x / more for x in (5.0, 2.5, 2.5)).cells("over_blockwise_rate")
    assert {name: ring[name] for name in expected} == pytest.approx(expected)
    assert not set(expected) & set(blockwise)
    # The rate that blockwise attention reached gives its seconds again.
    assert sum(project(Step.of(tiny("blockwise", 64)), rates).values()) == pytest.approx(4.0)
    assert rates.peak == pytest.approx(4000 / 8)
    path = tmp_path / "rates.csv"
    write_rows(path, [vars(rates)])
    assert read_rates(path) == rates


def test_a_known_accelerator_has_its_makers_peak_in_bfloat16_alone(monkeypatch):
    sxm = "NVIDIA H100 80GB HBM3"
    for kind, itemsize, peak in ((sxm, 2, 989e12), (sxm, 4, None), ("NVIDIA H100 PCIe", 2, None)):
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [SimpleNamespace(device_kind=kind)])
        assert known_peak(itemsize)[0] == peak


@pytest.mark.parametrize(("method", "context", "ring"), [("ring", 64, 8), ("blockwise", 8, 1)])
def test_text_lies_in_the_order_of_the_ring_and_asks_for_the_next_token(tiny, method, context, ring):
    step = tiny(method, context)
    batch = random_text(step)
    assert batch.tokens.shape == (8 // ring, context)
    places = np.asarray(batch.positions[0])
    np.testing.assert_array_equal(places, order("zigzag", context, ring))
    tokens, targets = (np.asarray(each)[:, np.argsort(places)] for each in (batch.tokens, batch.targets))
    np.testing.assert_array_equal(targets[:, :-1], tokens[:, 1:])
    shapes = step.train_step.batch(step.mesh, step.rules)
    assert batch.tokens.sharding.is_equivalent_to(shapes.tokens.sharding, 2)


def test_what_does_not_fit_is_refused_before_it_runs(tiny, monkeypatch):
    monkeypatch.setattr(LlamaStep, "compiled", None)
    monkeypatch.setattr(PlannedMemory, "of", lambda compiled: PlannedMemory(10**15, 0))
    with pytest.raises(DoesNotFitError, match=r"tiny with ring .* 32 tokens: needs 8000000\.0 GB"):
        updates(tiny("ring", 32))
