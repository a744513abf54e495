"""The four methods train alike, each with less memory."""

import jax
import numpy as np
import pytest

from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import abstract_state
from evals.compile import llama_step
from evals.compile.llama_step import METHODS, LlamaStep, Shape
from evals.utilisation.measured_mfu import updates


@pytest.mark.slow
def test_methods_differ_only_in_memory_and_each_update_starts_where_the_last_one_stopped(monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", Shape(48, 64, 2, 8, kv_heads=4, vocab_size=96))
    monkeypatch.setattr(llama_step, "CHUNK", 8)
    losses = {}
    for method in METHODS:
        devices = jax.devices() if method == "ring" else jax.devices()[:1]  # for the same one sequence
        step = LlamaStep("tiny", method, 128, tuple(devices), "float32")
        update = updates(step)
        losses[method] = [float(update()["loss"]) for _ in range(3)]
        np.testing.assert_allclose(losses[method], losses["vanilla"], rtol=1e-5, err_msg=method)
    first, second, third = losses["vanilla"]
    assert abs(first - np.log(96)) < 1
    assert third < second != first


def test_the_mesh_spreads_a_width_that_does_not_divide(monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", Shape(36, 64, 2, 2))
    step = LlamaStep("tiny", "ring", 128, tuple(jax.devices()), remat="offload")
    assert step.config.transformer.remat == "offload"
    assert (step.mesh.shape["fsdp"], step.mesh.shape["ring"]) == (2, 4)
    optimizer = make_optimizer(step.train_step.optimizer, 1)
    state = abstract_state(step.train_step.model, optimizer, step.mesh, step.rules)
    for weight in jax.tree.leaves(state.params):
        if weight.ndim > 2 or weight.shape[-1] > 36:
            assert np.prod(weight.sharding.shard_shape(weight.shape)) * 8 == weight.size, weight.shape


@pytest.mark.slow
def test_each_method_needs_less_than_the_one_before(monkeypatch):
    shape, context = Shape(64, 1024, 2, 2, vocab_size=64), 4096
    monkeypatch.setitem(llama_step.SHAPES, "tiny", shape)
    monkeypatch.setattr(llama_step, "CHUNK", 128)
    vanilla, memory_efficient, blockwise = (
        LlamaStep("tiny", method, context, tuple(jax.devices()[:1]), "float32").train_step.memory().temporary
        for method in ("vanilla", "memory_efficient", "blockwise")
    )
    assert vanilla - memory_efficient > 4 * shape.heads * context**2 / 2, "half a matrix of scores"
    assert memory_efficient - blockwise > 4 * shape.ffn_width * context, "the hidden activations"
