"""The memory formula: exact where it can be, in proportion elsewhere."""

import pytest

from agentic_ring.models.model import Model
from evals.compile.llama_step import METHODS, SHAPES, LlamaStep
from evals.compile.memory_formula import MemoryFormula


def model(name: str = "7B", method: str = "ring", remat: str = "full", devices: int = 8) -> MemoryFormula:
    return MemoryFormula(SHAPES[name], method, remat, devices, itemsize=4, platform="tpu")


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_models(name):
    config = LlamaStep(name, "vanilla", 128, (None,)).config
    assert model(name).parameters == pytest.approx(Model(config).parameter_count(), rel=2e-3)


def test_a_ring_of_more_devices_takes_a_longer_sequence_into_the_same_bytes():
    per_token = (model(devices=8).bytes(2**20) - model(devices=8).constant()) / 2**17
    assert per_token == model().per_token()
    assert model(devices=16).bytes(2**21) < model(devices=8).bytes(2**20)


def test_methods_and_offload_order():
    bytes_of = [model(method=method).bytes(2**15) for method in METHODS]
    assert bytes_of == sorted(bytes_of, reverse=True)
    assert model(remat="offload").bytes(2**20) < model().bytes(2**20)


@pytest.mark.parametrize("method", METHODS)
def test_the_longest_fits_and_its_double_does_not(method):
    formula, limit = model(method=method), 80e9
    context = formula.longest(limit)
    assert formula.bytes(context) <= limit < formula.bytes(2 * context)
