"""Ring attention against float64: forward, gradients, empty rows."""

import random
from collections import namedtuple
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from agentic_ring.attention import MaskSpec, alibi_slopes, attention, reference_attention
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from tests.attention.oracle import differentiated, errors, exact, random_arrays

# Rounding to bfloat16 errs by up to 2**-9. An output is rounded once at the end and its probabilities once on
# the way; a gradient goes through up to three rounded factors that add up in sums.
TOLERANCES = {  # relative, of the output and the gradients
    "float32": (2e-6, 1e-5),
    "bfloat16": (2 * 2**-8, 4 * 2**-8),
    "float64": (1e-13, 1e-12),
}


FACTORS: dict[str, tuple[Any, ...]] = {
    "ring": (1, 2, 4, 8),
    # Half of each block each way round; an outer axis of 2.
    "strategy": ("ring", "bidirectional ring", "double ring", "all_gather", "ulysses", "ulysses_ring"),
    "mask": (
        "causal",
        "bidirectional",
        "causal segments",  # packed sequences, the last tokens padding
        "bidirectional segments",
        "causal positions",  # a permutation, the last tokens padding
        "causal window",
        "bidirectional window",
        "causal window prefix",
        "causal prefix segments",
        "causal hidden",  # a tree; random ranges of rows
        "bidirectional hidden positions",  # which only say which tokens are padding
    ),
    "scores": ("plain", "soft cap", "sinks", "dropout", "by head"),
    "heads": ((8, 8), (8, 2), (8, 1)),  # multi-head, grouped-query, multi-query
    "layout": ("contiguous", "striped", "block_striped", "zigzag"),
    "length": (64, 53),  # 53 divides over nothing; values are then smaller than keys
    "chunks": (None, (3, 5)),  # 3 and 5 divide no block
    "kernel": ("xla", "vanilla"),
    "dtype": ("float32", "bfloat16", "float64"),
}
SMALLEST_RING = {"double ring": 4, "ulysses": 2, "ulysses_ring": 4}
BATCH, HEAD_DIM = 2, 8
Case = namedtuple("Case", FACTORS)


def pairwise_cases() -> list:
    """Cases in which every pair of values of two factors that exists occurs, as faults come from few factors.

    Each case is that of many random ones in which most missing pairs meet.
    """
    choose = random.Random(3).choice
    cases = [Case(*map(choose, FACTORS.values())) for _ in range(4000)]
    cases = [case for case in cases if case.ring >= SMALLEST_RING.get(case.strategy, 1)]
    cases = [case for case in cases if case.chunks is None or case.kernel == "xla"]  # the other has none
    settings = [(name, value) for name, values in FACTORS.items() for value in values]
    has = np.array([[getattr(case, name) == value for name, value in settings] for case in cases], float)
    missing, chosen = has.T @ has > 0, []
    while missing.any():
        best = (has @ missing * has).sum(axis=1).argmax()
        chosen.append(cases[best])
        missing &= np.outer(has[best], has[best]) == 0
    return chosen


def name(case) -> str:
    return "-".join("x".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in case).replace(" ", "_")


def problem(case) -> tuple[list[jax.Array], dict[str, Any], np.ndarray]:
    """q, k, v and d_output in the dtype of the case, its mask and scores, and which rows are padding."""
    length = case.length
    generator = np.random.default_rng(length * case.heads[1])
    q, k = ((BATCH, length, heads, HEAD_DIM) for heads in case.heads)
    arrays = random_arrays(q, k, HEAD_DIM if length == 64 else 5, seed=length * case.heads[1])
    padding, labels = np.arange(length) >= length - np.array([[5], [0]]), {}
    if "segments" in case.mask:
        segments = np.sort(generator.integers(0, 4, (BATCH, length)), axis=1)
        labels["segment_ids"] = jnp.asarray(np.where(padding, -1, segments))
    if "positions" in case.mask:
        positions = np.stack([generator.permutation(length) for _ in range(BATCH)])
        labels["positions"] = jnp.asarray(np.where(padding, -1, positions))
    empty_rows = padding if labels else np.zeros_like(padding)
    if "hidden" in case.mask:
        # Two ranges for each key of each row, or one that all rows share; some are empty.
        shape = (1, length, 2) if labels else (BATCH, length, 4)
        firsts = generator.integers(0, length, (*shape[:2], shape[2] // 2))
        ends = firsts + generator.integers(-2, length // 3, firsts.shape)
        labels["hidden_rows"] = jnp.asarray(np.stack((firsts, ends), axis=-1).reshape(shape))
    spec = MaskSpec(
        causal=case.mask.startswith("causal"),
        window=11 if "window" in case.mask else None,
        prefix=9 if "prefix" in case.mask else 0,
    )
    sinks = jnp.asarray(generator.normal(size=8), "float64" if case.dtype == "float64" else "float32")
    scores: dict[str, dict[str, Any]] = {
        "plain": {},
        "soft cap": {"soft_cap": 1.5},  # most scores lie within 3
        "sinks": {"sinks": sinks, "return_logsumexp": True},
        "dropout": {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)},
        "by head": {"alibi_slopes": alibi_slopes(8), "head_windows": (3, None, 20, 1, 7, 40, 11, 5)},
    }
    options = {"mask": spec, **labels, **scores[case.scores]}
    return [jnp.asarray(x, case.dtype) for x in arrays], options, empty_rows


def attend_as(case) -> partial:
    """``attention`` on the devices of the case, in its way."""
    chunks = dict(zip(("query_chunk", "key_chunk"), case.chunks or (None, None), strict=True))
    ring = case.strategy.endswith("ring") and case.strategy != "ulysses_ring"
    schedule = "bidirectional" if case.strategy == "bidirectional ring" else "unidirectional"
    options = {"strategy": "ring" if ring else case.strategy, "schedule": schedule, "layout": case.layout}
    devices = jax.devices()[: case.ring]
    mesh = make_mesh(MeshShape(ring=case.ring), devices=devices)
    if case.strategy == "double ring":
        mesh = jax.make_mesh((2, case.ring // 2), ("outer", "inner"), (AxisType.Auto,) * 2, devices=devices)
        options["rules"] = ShardingRules(sequence=("outer", "inner"))
    return partial(attention, mesh=mesh, kernel=case.kernel, **chunks, **options)


PAIRS = pairwise_cases()
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in PAIRS[19:]]


@pytest.mark.parametrize("case", PAIRS[:19] + SLOW, ids=name)
def test_equals_the_oracle(case):
    """Any two settings meet in some case, 7 of 10 pairs and each setting in one that is not slow."""
    with jax.enable_x64(case.dtype == "float64"):
        arrays, options, empty = problem(case)
        result = differentiated(attend_as(case), arrays, **options)
    assert result.output.dtype == case.dtype
    found = errors(result, exact(arrays, **options))
    forward, gradient = TOLERANCES[case.dtype]
    assert max(found.pop("output"), found.pop("logsumexp", 0.0)) < forward
    assert max(found.values()) < gradient, found
    for array in result[:4]:
        assert not np.asarray(array)[empty].any(), "a row with nothing to attend to is not exactly 0"


@pytest.mark.parametrize(
    ("mask", "scores"),
    [
        ("causal segments", "soft cap"),
        ("causal window prefix", "sinks"),
        ("causal hidden", "by head"),
        ("bidirectional hidden positions", "sinks"),
        ("bidirectional window", "dropout"),
    ],
)
def test_the_public_oracle(mask: str, scores: str):
    with jax.enable_x64(True):
        case = Case(1, "", mask, scores, (8, 2), "", 53, None, "", "float64")
        arrays, options, _ = problem(case)
        result = differentiated(reference_attention, arrays, **options)
    assert max(errors(result, exact(arrays, **options)).values()) < 1e-12
