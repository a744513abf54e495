"""The explanation says what the call does. Nothing here is compiled but one small call."""

import logging

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.attention import STRATEGIES, MaskSpec, attention, plan
from agentic_ring.attention.explain import explain
from agentic_ring.attention.inputs import AttentionOptions
from agentic_ring.errors import ArgumentError, MeshError
from agentic_ring.mesh import MeshShape, make_mesh


def arrays(batch=1, tokens=32768, heads=8, key_heads=8, head_dim=128, dtype="bfloat16"):
    return [
        jax.ShapeDtypeStruct((batch, tokens, n, head_dim), jnp.dtype(dtype))
        for n in (heads, key_heads, key_heads)
    ]


def explained(shape=MeshShape(ring=8), **options):
    sizes = {name: options.pop(name) for name in tuple(options) if name in arrays.__code__.co_varnames}
    segments = options.pop("segments", False)
    return explain(*arrays(**sizes), AttentionOptions(**options), mesh=make_mesh(shape), segments=segments)


def tiles(explanation) -> list[str]:
    return [f"{tile.direction}: {tile}" for tile in explanation.calls]


@pytest.mark.parametrize(
    ("options", "strategy", "others"),
    [
        (
            {},
            "ring",
            {
                "local": "do the work of all",
                "all_gather": "estimated",
                "ulysses": "times ring",
                "ulysses_ring": "two mesh axes",
            },
        ),
        ({"tokens": 64, "dtype": "float32"}, "ulysses", {"ring": "times ulysses"}),
        (
            {"tokens": 64, "dtype": "float32", "heads": 3, "key_heads": 3},
            "all_gather",
            {
                "ring": "times all_gather",
                "ulysses": "cannot serve: 3 query and 3 key heads per device do not",
            },
        ),
        (
            {"tokens": 64, "dtype": "float32", "heads": 3, "key_heads": 3, "batch": 200_000},
            "ring",
            {"all_gather": "GiB per device, the limit is 1.0", "ulysses_ring": "cannot serve"},
        ),
        ({"mask": MaskSpec(window=9)}, "ring", {"all_gather": "the window needs few"}),
        (
            {"shape": MeshShape(data=8), "batch": 8},
            "local",
            dict.fromkeys(STRATEGIES[1:], "the sequence is whole"),
        ),
        (
            {"strategy": "local"},
            "local",
            {"ring": '"auto" takes it: CPU devices keep blocks', "ulysses": "times ring"},
        ),
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
    explanation = explained()
    assert explanation.decision.choice.strategy == "ulysses"
    times = {strategy: estimate.total for strategy, estimate in explanation.estimates.items()}
    assert min(times, key=times.__getitem__) == "ulysses"
    assert set(times) == {"ring", "all_gather", "ulysses", "ulysses_ring"}
    assert "ulysses" not in explained(heads=3, key_heads=3).estimates
    assert not explained(mask=MaskSpec(window=9)).estimates
    assert not explained(MeshShape(data=8), batch=8).estimates
    # Also of a sequence in zigzag order already, as the models pass it.
    permuted = explained(layout="zigzag", permuted=True)
    assert permuted.decision.choice.strategy == "ulysses"


def test_the_call_takes_what_was_explained(caplog):
    explanation = explained(tokens=72, heads=2, key_heads=1, head_dim=8, dtype="float32")
    with caplog.at_level(logging.INFO, logger="agentic_ring"):
        attention(*(jnp.zeros(x.shape) for x in arrays(1, 72, 2, 1, 8)), mesh=make_mesh(MeshShape(ring=8)))
    choice = explanation.decision.choice
    assert f"attention strategy {choice.strategy}: {choice.reason}" in caplog.messages
    assert explanation.tokens == 80  # a multiple of the 16 halves of zigzag


def test_tiles_are_those_of_the_program():
    zigzag = [
        "1 row of 4096 queries x 4096 keys, 8 and 2 heads, causal",
        "1 row of 2048 queries x 2048 keys, 8 and 2 heads, no mask",
    ]
    expected = [f"{direction}: {tile}" for direction in ("forward", "backward") for tile in zigzag]
    assert sorted(tiles(explained(key_heads=2))) == sorted(expected)
    whole = "1 row of 32768 queries x 32768 keys, 1 and 1 heads, causal, in segments"
    assert f"forward: {whole}" in tiles(explained(strategy="ulysses", segments=True))
    windowed = tiles(explained(mask=MaskSpec(window=10)))
    assert any("causal, window 10, 4096 tokens apart" in tile for tile in windowed)
    prefixed = tiles(explained(mask=MaskSpec(prefix=10)))
    assert any("causal, prefix 10, by positions" in tile for tile in prefixed)


def test_kernels_of_this_platform():
    explanation = explained()
    assert set(explanation.kernels.values()) == {"xla"}
    assert not explanation.refusals["xla"]
    assert not explanation.refusals["vanilla"]
    for name, platform in (("cudnn", "gpu"), ("splash", "tpu")):
        (reason,) = set(explanation.refusals[name].values())
        assert f"runs on {platform} devices, but these are cpu" in reason


def test_kernels_of_other_platforms(monkeypatch):
    monkeypatch.setattr(plan, "mesh_platform", lambda mesh: "tpu")
    explanation = explained()
    assert set(explanation.kernels.values()) == {"splash"}
    explanation = explained(dropout_rate=0.1)
    assert set(explanation.kernels.values()) == {"xla"}
    assert len(explanation.refusals["splash"]) == len(explanation.calls)
    monkeypatch.setattr(plan, "mesh_platform", lambda mesh: "gpu")
    explanation = explained(soft_cap=30.0)
    assert set(explanation.refusals["cudnn"].values()) == {"a soft cap"}
    assert set(explanation.kernels.values()) == {"xla"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 6, "key_heads": 4}, ArgumentError, "q has 6 heads and k has 4"),
        ({"heads": 3, "key_heads": 3, "strategy": "ulysses"}, MeshError, "do not divide over 8 devices"),
        ({"dropout_rate": 1.0}, ArgumentError, "dropout_rate is 1.0"),
        ({"soft_cap": -1.0}, ArgumentError, "soft_cap is -1.0"),
    ],
)
def test_mistakes_are_those_of_the_call(options, error, message):
    with pytest.raises(error, match=message):
        explained(**options)
