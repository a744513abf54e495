"""The explanation says what the call does. Nothing here is compiled but one small call."""

import logging

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.attention import STRATEGIES, attention, plan
from agentic_ring.attention.explain import explain
from agentic_ring.mesh import MeshShape, make_mesh


def arrays(batch=1, tokens=32768, heads=8, key_heads=None, head_dim=128, dtype="bfloat16"):
    key_heads = key_heads or heads
    shapes = ((batch, tokens, n, head_dim) for n in (heads, key_heads, key_heads))
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def explained(shape=MeshShape(ring=8), **options):
    sizes = {name: options.pop(name) for name in tuple(options) if name in arrays.__code__.co_varnames}
    return explain(*arrays(**sizes), mesh=make_mesh(shape), **options)


SHORT = {"tokens": 64, "dtype": "float32"}


@pytest.mark.parametrize(
    ("options", "strategy", "others"),
    [
        ({}, "ring", {"local": "work of all", "ulysses": "times ring", "ulysses_ring": "two mesh axes"}),
        (SHORT | {"heads": 3}, "all_gather", {"ring": "times all_gather", "ulysses": "3 query and 3 key"}),
        ({"shape": MeshShape(data=8), "batch": 8}, "local", dict.fromkeys(STRATEGIES[1:], "whole")),
        ({"strategy": "local"}, "local", {"ring": '"auto" takes it', "ulysses": "times ring"}),
    ],
)
def test_the_strategy_and_why_no_other(options, strategy, others):
    explanation = explained(**options)
    assert explanation.decision.choice.strategy == strategy
    assert set(explanation.others) == set(STRATEGIES) - {strategy}
    for other, reason in others.items():
        assert reason in explanation.others[other]


def test_the_estimates_and_the_choice_of_a_platform(monkeypatch):
    monkeypatch.setattr(plan, "mesh_platform", lambda mesh: "gpu")
    # Also of a sequence in zigzag order already, as the models pass it.
    for options in ({}, {"layout": "zigzag", "permuted": True}):
        explanation = explained(**options)
        times = {strategy: estimate.total for strategy, estimate in explanation.estimates.items()}
        assert explanation.decision.choice.strategy == min(times, key=times.__getitem__) == "ulysses"
        assert set(times) == {"ring", "all_gather", "ulysses", "ulysses_ring"}


def test_the_call_takes_what_was_explained(caplog):
    explanation = explained(tokens=72, heads=2, key_heads=1, head_dim=8, dtype="float32")
    with caplog.at_level(logging.INFO, logger="agentic_ring"):
        attention(*(jnp.zeros(x.shape) for x in arrays(1, 72, 2, 1, 8)), mesh=make_mesh(MeshShape(ring=8)))
    choice = explanation.decision.choice
    assert f"attention strategy {choice.strategy}: {choice.reason}" in caplog.messages
    assert explanation.tokens == 80  # a multiple of the 16 halves of zigzag


@pytest.mark.parametrize(
    ("platform", "options", "kernel", "refused"),
    [
        ("cpu", {}, "xla", {"cudnn": "runs on gpu devices", "splash": "runs on tpu devices"}),
        ("tpu", {}, "splash", {}),
        ("tpu", {"dropout_rate": 0.1}, "xla", {"splash": "positions"}),
        ("gpu", {"soft_cap": 30.0}, "xla", {"cudnn": "a soft cap"}),
    ],
)
def test_kernels_of_platforms(platform, options, kernel, refused, monkeypatch):
    monkeypatch.setattr(plan, "mesh_platform", lambda mesh: platform)
    explanation = explained(**options)
    assert set(explanation.kernels.values()) == {kernel}
    assert not explanation.refusals["xla"]
    for name, reason in refused.items():
        assert len(explanation.refusals[name]) == len(explanation.calls)
        assert all(reason in text for text in explanation.refusals[name].values())
