"""The four methods train alike; sizes that do not divide are refused; the memory formula."""

import jax
import numpy as np
import pytest

from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.models.model import Model
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import abstract_state
from evals.compile import llama_step
from evals.compile.llama_step import METHODS, SHAPES, LlamaStep, MemoryFormula, Shape
from evals.utilisation.measured_mfu import RunningStep


@pytest.mark.slow
def test_methods_differ_only_in_memory_and_each_update_starts_where_the_last_one_stopped(monkeypatch):
    monkeypatch.setitem(llama_step.SHAPES, "tiny", Shape(48, 64, 2, 8, kv_heads=4, vocab_size=96))
    monkeypatch.setattr(llama_step, "CHUNK", 8)
    losses = {}
    for method in METHODS:
        step = LlamaStep("tiny", method, 128, tuple(jax.devices()), "float32", sequences=8)
        update = RunningStep(step).updates()
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
        LlamaStep("tiny", method, context, tuple(jax.devices()), "float32").train_step.memory().temporary
        for method in ("vanilla", "memory_efficient", "blockwise")
    )
    assert vanilla - memory_efficient > 4 * shape.heads * context**2 / 2, "half a matrix of scores"
    assert memory_efficient - blockwise > 4 * shape.ffn_width * context, "the hidden activations"


def test_impossible_steps_are_refused():
    for arguments, sequences, error, named in (
        (("9B", "ring", 128), None, UnknownNameError, "9B"),
        (("7B", "flash", 128), None, UnknownNameError, "flash"),
        (("7B", "ring", 100), None, ArgumentError, "100"),
        (("7B", "ring", 0), None, ArgumentError, "0 tokens"),
        (("7B", "blockwise", 128), 12, ArgumentError, "12 sequences"),
    ):
        with pytest.raises(error, match=named):
            LlamaStep(*arguments, tuple(range(8)), sequences=sequences)


def formula(name: str = "7B", method: str = "ring", remat: str = "full", devices: int = 8) -> MemoryFormula:
    return MemoryFormula(SHAPES[name], method, remat, devices, itemsize=4, platform="tpu")


def test_the_formula():
    for name in ("tiny", "8B"):  # all heads, and grouped ones
        config = LlamaStep(name, "vanilla", 128, (None,)).config
        assert formula(name).parameters == pytest.approx(Model(config).parameter_count(), rel=2e-3), name
    per_token = (formula().bytes(2**20) - formula().constant) / 2**17
    assert per_token == formula().per_token
    assert formula(devices=16).bytes(2**21) < formula().bytes(2**20)
    assert formula(remat="offload").bytes(2**20) < formula().bytes(2**20)
    formulas = [formula(method=method) for method in METHODS]
    bytes_of = [each.bytes(2**15) for each in formulas]
    assert bytes_of == sorted(bytes_of, reverse=True)
    for each in formulas:
        context = each.longest(80e9)
        assert each.bytes(context) <= 80e9 < each.bytes(2 * context), each.method
