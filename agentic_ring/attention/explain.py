"""Explains how a call of ``attention`` would run and why, without running it.

The decision is the one that ``attention`` makes. The tiles are those that its traced forward and
backward hand to a kernel, so that each kernel can be asked whether it takes them.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from agentic_ring.attention.choose_strategy import Estimate, estimates, reason_against
from agentic_ring.attention.inputs import STRATEGIES, AttentionInputs, Strategy, split_arguments
from agentic_ring.attention.kernels.interface import Gradients, Kernel, Saved, SoftmaxState, Tile
from agentic_ring.attention.kernels.registry import KERNELS, FirstThatServes, select_kernel
from agentic_ring.attention.mask import TokenLabels
from agentic_ring.attention.plan import Decision, decide, run
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import ShardingRules


@dataclass(frozen=True)
class KernelCall:
    """One kind of call of a kernel."""

    direction: Literal["forward", "backward"]
    arguments: tuple[Any, ...]
    """Its ``Tile`` and for the backward ``Saved``, with shapes and dtypes in the place of arrays."""

    def __str__(self) -> str:
        q, k, _, mask, _ = self.arguments[0]
        spec = "causal" if mask.spec.causal else "both ways"
        spec += "" if mask.spec.window is None else f", window {mask.spec.window}"
        spec += f", prefix {mask.spec.prefix}" if mask.spec.prefix else ""
        spec += f", {mask.offset} tokens apart" if mask.offset else ""
        spec += "" if mask.query.positions is None else ", by positions"
        spec += "" if mask.query.segment_ids is None else ", in segments"
        rows = f"{q.shape[0]} row" + ("s" if q.shape[0] > 1 else "")
        return (
            f"{rows} of {q.shape[1]} queries x {k.shape[1]} keys, {q.shape[2]} and {k.shape[2]} heads, "
            f"{'no mask' if mask.trivial else spec}"
        )


@dataclass(frozen=True)
class Explanation:
    """How a call would run."""

    decision: Decision
    others: dict[Strategy, str]
    """Why each other strategy is not taken."""
    estimates: dict[Strategy, Estimate]
    """Of each strategy that can serve; empty without a ring or with a narrow window."""
    tokens: int
    """Length of the sequence with its padding."""
    calls: tuple[KernelCall, ...]
    """Every kind of call of a kernel that a device makes."""
    refusals: dict[str, dict[KernelCall, str]]
    """By kernel, the calls that it refuses and why."""
    kernels: dict[KernelCall, str]
    """The kernel that "auto" takes for each call."""


def explain(
    q: jax.ShapeDtypeStruct,
    k: jax.ShapeDtypeStruct,
    v: jax.ShapeDtypeStruct,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    segments: bool = False,
    **options: Any,
) -> Explanation:
    """Explains ``attention(q, k, v, ...)`` for arrays of these shapes and dtypes, with its errors.

    ``segments`` says whether segment ids are given; ``options`` are the static ones, without a kernel.
    """
    # The XLA kernel serves every case, so that all tiles are seen.
    dropout_key = jax.random.key(0) if options.get("dropout_rate") else None
    arguments = {"q": q, "k": k, "v": v, "kernel": "xla", "dropout_key": dropout_key}
    static, inputs = split_arguments(arguments | options)
    if segments:
        query, key = (TokenLabels(segment_ids=jax.eval_shape(_no_labels, x)) for x in (q, k))
        inputs = replace(inputs, query=query, key=key)
    rules = ShardingRules()
    auto = decide(inputs, replace(static, strategy="auto"), mesh, rules)
    decision = decide(inputs, static, mesh, rules)
    others: dict[Strategy, str] = {
        other: f'"auto" takes it: {auto.choice.reason}'
        if other == auto.choice.strategy
        else reason_against(auto.shapes, static.mask, auto.platform, other)
        for other in STRATEGIES
        if other != decision.choice.strategy
    }
    calls = _kernel_calls(decision, inputs)
    refusals = {name: _refusals(name, decision.platform, calls) for name in KERNELS if name != "auto"}
    auto_kernel = select_kernel("auto", platform=decision.platform)
    assert isinstance(auto_kernel, FirstThatServes)
    kernels = {
        call: next(name for name, _ in auto_kernel.candidates if call not in refusals[name]) for call in calls
    }
    times = estimates(auto.shapes, static.mask, auto.platform)
    return Explanation(decision, others, times, decision.plan.padded(q.shape[1]), calls, refusals, kernels)


def _no_labels(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape[:2], jnp.int32)


def _refusals(name: str, platform: str, calls: tuple[KernelCall, ...]) -> dict[KernelCall, str]:
    """The calls that a kernel does not take, and why. Traces the kernel and compiles nothing."""
    refusals = {}
    for call in calls:
        try:
            kernel = select_kernel(name, platform=platform)
            jax.eval_shape(getattr(kernel, call.direction), *call.arguments)
        except (ArgumentError, NotImplementedError) as refusal:
            refusals[call] = str(refusal)
    return refusals


def _kernel_calls(decision: Decision, inputs: AttentionInputs) -> tuple[KernelCall, ...]:
    """Every kind of call that the forward and the backward make of the kernel, in that order."""
    plan = decision.plan
    recorder = _Recorder(plan.sharded.kernel, {})
    plan = replace(plan, sharded=replace(plan.sharded, kernel=recorder))

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        query, key = jax.tree.map(_no_labels, (inputs.query, inputs.key))
        labelled = replace(inputs, query=query, key=key)
        output, vjp = jax.vjp(lambda q, k, v: run(plan, replace(labelled, q=q, k=k, v=v)), q, k, v)
        return vjp(output)

    jax.eval_shape(both, inputs.q, inputs.k, inputs.v)
    return tuple(recorder.calls)


@dataclass(frozen=True, eq=False)
class _Recorder:
    """A kernel that notes what it is handed, in a dict for its order, and passes it on."""

    kernel: Kernel
    calls: dict[KernelCall, None]

    def forward(self, tile: Tile) -> SoftmaxState:
        self._note("forward", tile)
        return self.kernel.forward(tile)

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        self._note("backward", tile, saved)
        return self.kernel.backward(tile, saved)

    def _note(self, direction: Literal["forward", "backward"], *arguments: Any) -> None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        self.calls[KernelCall(direction, shapes)] = None
