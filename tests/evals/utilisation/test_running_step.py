"""Steps that run on simulated devices: their batches, their updates, and steps that do not fit."""

import math

import jax
import numpy as np
import pytest

from agentic_ring.attention import order
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from evals.compile import llama_step
from evals.compile.llama_step import LlamaStep
from evals.utilisation.running_step import RunningStep, random_text


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", llama_step.Shape(32, 48, 1, 4))


def step(method, context):
    return LlamaStep("tiny", method, context, tuple(jax.devices()), "float32")


@pytest.mark.parametrize(("method", "context", "ring"), [("ring", 64, 8), ("blockwise", 8, 1)])
def test_text_lies_in_the_order_of_the_ring_and_asks_for_the_next_token(method, context, ring):
    batch = random_text(step(method, context), seed=0)
    assert batch.tokens.shape == (8 // ring, context)
    places = np.asarray(batch.positions[0])
    np.testing.assert_array_equal(places, order("zigzag", context, ring))
    back = np.argsort(places)
    tokens, targets = np.asarray(batch.tokens)[:, back], np.asarray(batch.targets)[:, back]
    np.testing.assert_array_equal(targets[:, :-1], tokens[:, 1:])
    assert tokens.max() < 32_000
    shapes = step(method, context).train_step.batch(step(method, context).mesh, step(method, context).rules)
    assert batch.tokens.sharding.is_equivalent_to(shapes.tokens.sharding, 2)


@pytest.mark.slow
def test_each_update_starts_where_the_last_one_stopped():
    update = RunningStep(step("ring", 32)).updates()
    losses = [float(update()["loss"]) for _ in range(3)]
    assert losses[0] == pytest.approx(math.log(32_000), rel=0.1)
    assert len(set(losses[1:])) == 2
    assert losses[2] < losses[1]


def test_what_does_not_fit_is_refused_before_it_runs(monkeypatch):
    monkeypatch.setattr(RunningStep, "compiled", None)
    monkeypatch.setattr(PlannedMemory, "of", lambda compiled: PlannedMemory(10**15, 0))
    message = r"tiny with ring attention over 32 tokens: needs 8000000\.0 GB .* smaller model"
    with pytest.raises(DoesNotFitError, match=message):
        RunningStep(step("ring", 32)).updates()
