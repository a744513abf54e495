"""The four methods train alike; sizes that do not divide are refused."""

import jax
import numpy as np
import pytest

from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import init_state
from evals.compile import llama_step
from evals.compile.llama_step import METHODS, LlamaStep, Shape
from evals.utilisation.running_step import random_text


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", Shape(48, 64, 2, 8, kv_heads=4, vocab_size=96))
    monkeypatch.setattr(llama_step, "CHUNK", 8)


def losses(method: str, remat: str = "full", updates: int = 2) -> list[float]:
    """Returns the losses on 8 texts of 128 tokens, the same for every method."""
    step = LlamaStep("tiny", method, 128, tuple(jax.devices()), "float32", sequences=8, remat=remat)
    train_step = step.train_step
    compiled = train_step.lower().compile()
    state = init_state(
        train_step.model, make_optimizer(train_step.optimizer, steps=1), 0, step.mesh, step.rules
    )
    batch, measured = random_text(step, 0), []
    for _ in range(updates):
        state, metrics = compiled(state, batch)
        measured.append(float(metrics["loss"]))
    return measured


@pytest.mark.slow
def test_methods_differ_only_in_memory(small):
    expected = losses("vanilla")
    assert abs(expected[0] - np.log(96)) < 1
    for method in METHODS[1:]:
        np.testing.assert_allclose(losses(method), expected, rtol=1e-5, err_msg=method)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["offload", "attention"])
def test_remat_changes_no_loss(small, remat):
    np.testing.assert_allclose(losses("ring", remat), losses("ring"), rtol=1e-6)


def test_the_mesh_spreads_a_width_that_does_not_divide(small, monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", Shape(36, 64, 2, 2))
    step = LlamaStep("tiny", "ring", 128, tuple(jax.devices()))
    assert (step.mesh.shape["fsdp"], step.mesh.shape["ring"]) == (2, 4)
    state = init_state(
        step.train_step.model, make_optimizer(step.train_step.optimizer, 1), 0, step.mesh, step.rules
    )
    for weight in jax.tree.leaves(state.params):
        if weight.ndim > 2 or weight.shape[-1] > 36:
            shard = weight.addressable_shards[0].data
            assert shard.size * 8 == weight.size, weight.shape


@pytest.mark.slow
def test_each_method_needs_less_than_the_one_before(monkeypatch):
    shape, context = Shape(64, 1024, 2, 2, vocab_size=64), 4096
    monkeypatch.setitem(llama_step.SHAPES, "tiny", shape)
    monkeypatch.setattr(llama_step, "CHUNK", 128)
    vanilla, memory_efficient, blockwise = (
        LlamaStep("tiny", method, context, tuple(jax.devices()), "float32").train_step.memory().temporary
        for method in ("vanilla", "memory_efficient", "blockwise")
    )
    assert vanilla - memory_efficient > 4 * shape.heads * context**2 / 2, "half a matrix of scores"
    assert memory_efficient - blockwise > 4 * shape.ffn_width * context, "the hidden activations"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("9B", "ring", 128), UnknownNameError, "7B"),
        (("7B", "flash", 128), UnknownNameError, "blockwise"),
        (("7B", "ring", 100), ArgumentError, "multiple of 16"),
        (("7B", "ring", 0), ArgumentError, "at least one token"),
    ],
)
def test_impossible_steps_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LlamaStep(*arguments, tuple(range(8)))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ArgumentError, match="multiple of 8 sequences"):
        LlamaStep("7B", "blockwise", 128, tuple(range(8)), sequences=12)
