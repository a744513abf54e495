"""The table of attention cases, their float64 truth, and what counts as equal to it."""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from agentic_ring.attention import MaskSpec, alibi_slopes, attention, reference_attention
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh


@dataclass(frozen=True)
class Case:
    """One combination of the choices of ``FACTORS``; see there."""

    ring: int
    strategy: str
    mask: str
    scores: str
    heads: tuple[int, int]
    layout: str
    length: int
    chunks: tuple[int, int] | None
    kernel: str
    dtype: str

    def __str__(self) -> str:
        parts = (getattr(self, field.name) for field in fields(self))
        words = ("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in parts)
        return "-".join(words).replace(" ", "_")


FACTORS: dict[str, tuple[Any, ...]] = {
    "ring": (1, 2, 4, 8),
    "strategy": (
        "ring",
        "bidirectional ring",  # half of each block each way round
        "double ring",  # an outer axis of 2
        "all_gather",
        "ulysses",
        "ulysses_ring",
    ),
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


def exists(choices: dict[str, Any]) -> bool:
    """Whether there are cases with these values of some factors. ``vanilla`` has no chunks."""
    ring, strategy = choices.get("ring", 8), choices.get("strategy", "ring")
    chunked = choices.get("chunks") is not None
    return ring >= SMALLEST_RING.get(strategy, 1) and not (chunked and choices.get("kernel") == "vanilla")


def pairwise_cases() -> list[Case]:
    """Cases in which every pair of values of two factors that exists occurs.

    Faults come from few factors at once, and the full product would compile for days. Each case starts from a
    pair that is missing; of some random completions, that with most missing ones is taken.
    """
    generator = random.Random(1)
    missing = {}  # a dict for its order, which a set of strings changes from process to process
    for names in itertools.combinations(FACTORS, 2):
        for values in itertools.product(*(FACTORS[name] for name in names)):
            pair = tuple(zip(names, values, strict=True))
            if exists(dict(pair)):
                missing[pair] = None

    def complete(pair: tuple) -> dict[str, Any]:
        while True:
            choices = {name: generator.choice(values) for name, values in FACTORS.items()} | dict(pair)
            if exists(choices):
                return choices

    def found(choices: dict[str, Any]) -> list[tuple]:
        return [pair for pair in itertools.combinations(choices.items(), 2) if pair in missing]

    chosen = []
    while missing:
        first = next(iter(missing))
        best = max((complete(first) for _ in range(30)), key=lambda choices: len(found(choices)))
        chosen.append(Case(**best))
        for pair in found(best):
            del missing[pair]
    return chosen


class Result(NamedTuple):
    """Attention and the gradients of its inner product with a fixed random array.

    Where the logsumexp is an output, what is differentiated has its product with such an array added.
    """

    output: Any
    dq: Any
    dk: Any
    dv: Any
    d_sinks: Any  # 0 where there are no sinks
    logsumexp: Any  # 0 where it is no output, or -inf


class Problem(NamedTuple):
    """The arrays of a case; those that are differentiated and d_output in its dtype."""

    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    sinks: jax.Array
    mask: MaskSpec
    labels: dict[str, jax.Array]
    empty_rows: np.ndarray  # bool [B, T]: padding, attends to nothing and is attended by nothing


@cache
def problem(mask: str, heads: tuple[int, int], length: int, dtype: str) -> Problem:
    """Random arrays and labels; the same for every ring, strategy, layout and kernel.

    Call it with ``jax.enable_x64`` where the dtype is float64.
    """
    generator = np.random.default_rng(length * heads[1])
    values = HEAD_DIM if length == 64 else 5
    sizes = zip((heads[0], heads[1], heads[1], heads[0]), (HEAD_DIM, HEAD_DIM, values, values), strict=True)
    q, k, v, d_output = (jnp.asarray(generator.normal(size=(BATCH, length, *size)), dtype) for size in sizes)
    padding = np.arange(length) >= length - np.array([[5], [0]])
    labels = {}
    if "segments" in mask:
        segments = np.sort(generator.integers(0, 4, (BATCH, length)), axis=1)
        labels["segment_ids"] = jnp.asarray(np.where(padding, -1, segments))
    if "positions" in mask:
        positions = np.stack([generator.permutation(length) for _ in range(BATCH)])
        labels["positions"] = jnp.asarray(np.where(padding, -1, positions))
    empty_rows = padding if labels else np.zeros_like(padding)
    if "hidden" in mask:
        # Two ranges for each key of each row, or one that all rows share; some are empty.
        shape = (1, length, 2) if labels else (BATCH, length, 4)
        firsts = generator.integers(0, length, (*shape[:2], shape[2] // 2))
        ends = firsts + generator.integers(-2, length // 3, firsts.shape)
        labels["hidden_rows"] = jnp.asarray(np.stack((firsts, ends), axis=-1).reshape(shape))
    spec = MaskSpec(
        causal=mask.startswith("causal"),
        window=11 if "window" in mask else None,
        prefix=9 if "prefix" in mask else 0,
    )
    sinks = jnp.asarray(generator.normal(size=heads[0]), "float64" if dtype == "float64" else "float32")
    return Problem((q, k, v, d_output), sinks, spec, labels, empty_rows)


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"soft_cap": 1.5},  # most scores lie within 3
    "sinks": {"return_logsumexp": True},
    "dropout": {"dropout_rate": 0.4},
    "by head": {"alibi_slopes": alibi_slopes(8), "head_windows": (3, None, 20, 1, 7, 40, 11, 5)},
}


def differentiated(function: Callable[..., jax.Array], case: Case, arrays: tuple) -> Result:
    """``function(q, k, v, ...)`` under the mask and the scores of the case, with its gradients."""
    _, _, spec, labels, _ = problem(case.mask, case.heads, case.length, case.dtype)
    options = {"mask": spec, **labels, **SCORES[case.scores]}
    if case.scores == "dropout":
        options["dropout_key"] = jax.random.key(3)
    *inputs, sinks, d_output = arrays

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        if case.scores == "sinks":
            return function(q, k, v, sinks=sinks, **options)
        return function(q, k, v, **options), jnp.zeros(q.shape[:3])

    (output, logsumexp), vjp = jax.vjp(attend, *inputs, sinks)
    gradients = vjp((d_output, d_output.sum(-1).astype(logsumexp.dtype)))
    return Result(output, *gradients, jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp))


@cache
def truth(mask: str, scores: str, heads: tuple[int, int], length: int, dtype: str) -> Result:
    """The oracle in float64, on the values that the arrays have in their dtype."""
    case = Case(1, "ring", mask, scores, heads, "contiguous", length, None, "vanilla", dtype)
    with jax.enable_x64(True):
        (*arrays, d_output), sinks, *_ = problem(mask, heads, length, dtype)
        arrays = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in (*arrays, sinks, d_output))
        return Result(*(np.asarray(x) for x in differentiated(reference_attention, case, arrays)))


def compute(case: Case) -> Result:
    """``attention`` and its gradients on the devices of the case."""
    with jax.enable_x64(case.dtype == "float64"):
        return _compute(case)


def _compute(case: Case) -> Result:
    (*arrays, d_output), sinks, *_ = problem(case.mask, case.heads, case.length, case.dtype)
    chunks = dict(zip(("query_chunk", "key_chunk"), case.chunks or (None, None), strict=True))
    ring = case.strategy.endswith("ring") and case.strategy != "ulysses_ring"
    options = {
        "strategy": "ring" if ring else case.strategy,
        "schedule": "bidirectional" if case.strategy == "bidirectional ring" else "unidirectional",
        "layout": case.layout,
        "kernel": case.kernel,
        **chunks,
    }
    devices = jax.devices()[: case.ring]
    mesh = make_mesh(MeshShape(ring=case.ring), devices=devices)
    if case.strategy == "double ring":
        mesh = jax.make_mesh((2, case.ring // 2), ("outer", "inner"), (AxisType.Auto,) * 2, devices=devices)
        options["rules"] = ShardingRules(sequence=("outer", "inner"))
    attend = functools.partial(attention, mesh=mesh, **options)
    run = jax.jit(lambda *arrays: differentiated(attend, case, arrays))
    result = run(*arrays, sinks, d_output)
    assert result.output.dtype == case.dtype
    return Result(*(np.asarray(x, np.float64) for x in result))


def largest(x: np.ndarray) -> float:
    return np.abs(x).max()


def relative_errors(result: Result, case: Case) -> dict[str, float]:
    """The largest difference from the oracle's result over the largest value of that result, by array."""
    expected = truth(case.mask, case.scores, case.heads, case.length, case.dtype)
    return {
        name: largest(got - want) / largest(want)
        for name, got, want in zip(Result._fields, result, expected, strict=True)
        if want.any() or got.any()
    }
