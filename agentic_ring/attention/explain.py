"""What a call of ``attention`` would do and why, without doing it.

The decision is the one that ``attention`` makes. The tiles are those that its traced forward and
backward hand to a kernel, so that each kernel can be asked whether it takes them.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from agentic_ring.attention.arguments import check_arrays, check_scores
from agentic_ring.attention.choose_strategy import against
from agentic_ring.attention.execution import run
from agentic_ring.attention.kernels.interface import Gradients, Kernel
from agentic_ring.attention.kernels.registry import KERNELS, FirstThatServes, select_kernel
from agentic_ring.attention.mask import MaskSpec, TokenLabels
from agentic_ring.attention.plan import Decision, decide
from agentic_ring.attention.ring.layout import Layout
from agentic_ring.attention.ring.transport import Schedule
from agentic_ring.attention.softmax import SoftmaxState
from agentic_ring.attention.strategies import STRATEGIES, Strategy
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import ShardingRules


@dataclass(frozen=True)
class Tile:
    """One kind of call of a kernel.

    Attributes:
      direction: of ``Kernel``.
      arguments: of that method; shapes and dtypes stand for the arrays.
    """

    direction: Literal["forward", "backward"]
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        q, k, mask = self.arguments[0], self.arguments[1], self.arguments[-2]
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

    def refused_by(self, kernel: Kernel) -> str | None:
        """Why a kernel does not take it; None where it does. Traces the kernel and compiles nothing."""
        try:
            jax.eval_shape(getattr(kernel, self.direction), *self.arguments)
        except NotImplementedError as refusal:
            return str(refusal)
        return None


@dataclass(frozen=True)
class Explanation:
    """What a call would do.

    Attributes:
      decision: made by ``attention``.
      others: why each other strategy is not taken.
      tokens: length of the sequence with its padding.
      tiles: that each device hands to a kernel, every kind once.
      refusals: by kernel, why it does not take those of the tiles that it does not take.
      kernels: which "auto" takes, by tile.
    """

    decision: Decision
    others: dict[Strategy, str]
    tokens: int
    tiles: tuple[Tile, ...]
    refusals: dict[str, dict[Tile, str]]
    kernels: dict[Tile, str]


def explain(
    q: jax.ShapeDtypeStruct,
    k: jax.ShapeDtypeStruct,
    v: jax.ShapeDtypeStruct,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    rules: ShardingRules = ShardingRules(),
    mask: MaskSpec = MaskSpec(causal=True),
    segments: bool = False,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    strategy: Strategy | Literal["auto"] = "auto",
    schedule: Schedule = "unidirectional",
    layout: Layout | Literal["auto"] = "auto",
) -> Explanation:
    """Explains ``attention(q, k, v, ...)`` for arrays of these shapes and dtypes.

    Args:
      q, k, v: stand for the arrays.
      segments: whether segment ids are given.
      mesh, rules, mask, soft_cap, dropout_rate, strategy, schedule, layout: as in ``attention``.

    Raises:
      ArgumentError, MeshError, UnknownNameError: as ``attention`` would.
    """
    check_arrays(q, k, v)
    dropout_key = jax.random.key(0) if dropout_rate else None
    check_scores(q, soft_cap, None, dropout_rate, dropout_key)

    def decided(strategy: Strategy | Literal["auto"]) -> Decision:
        return decide(
            q,
            k,
            mesh=mesh,
            rules=rules,
            mask=mask,
            counted=True,
            scale=None,
            soft_cap=soft_cap,
            dropout_rate=dropout_rate,
            strategy=strategy,
            schedule=schedule,
            layout=layout,
            permuted=False,
            kernel="xla",  # serves every case, so that all tiles are seen
            query_chunk=None,
            key_chunk=None,
        )

    auto, decision = decided("auto"), decided(strategy)
    others: dict[Strategy, str] = {}
    for other in STRATEGIES:
        if other == auto.choice.strategy != decision.choice.strategy:
            others[other] = f'"auto" takes it: {auto.choice.reason}'
        elif other != decision.choice.strategy:
            others[other] = against(auto.shapes, mask, auto.platform, other)
    tiles = _tiles(decision, q, k, v, segments, dropout_key)
    refusals = {name: _refusals(name, decision.platform, tiles) for name in KERNELS if name != "auto"}
    auto_kernel = select_kernel("auto", platform=decision.platform)
    assert isinstance(auto_kernel, FirstThatServes)
    kernels = {
        tile: next(name for name, _ in auto_kernel.candidates if tile not in refusals[name]) for tile in tiles
    }
    return Explanation(decision, others, decision.plan.padded(q.shape[1]), tiles, refusals, kernels)


def _refusals(name: str, platform: str, tiles: tuple[Tile, ...]) -> dict[Tile, str]:
    try:
        kernel = select_kernel(name, platform=platform)
    except ArgumentError as error:
        return dict.fromkeys(tiles, str(error))
    found = {tile: tile.refused_by(kernel) for tile in tiles}
    return {tile: reason for tile, reason in found.items() if reason is not None}


def _tiles(
    decision: Decision,
    q: jax.ShapeDtypeStruct,
    k: jax.ShapeDtypeStruct,
    v: jax.ShapeDtypeStruct,
    segments: bool,
    dropout_key: jax.Array | None,
) -> tuple[Tile, ...]:
    """Every kind of tile that the call's forward and backward hand to its kernel, in that order."""
    plan = decision.plan
    recorder = _Recorder(plan.sharded.kernel, {})
    plan = replace(plan, sharded=replace(plan.sharded, kernel=recorder))

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        query, key = (
            TokenLabels(segment_ids=jnp.zeros(x.shape[:2], jnp.int32) if segments else None) for x in (q, k)
        )
        output, vjp = jax.vjp(lambda q, k, v: run(plan, q, k, v, None, query, key, dropout_key), q, k, v)
        return vjp(output)

    jax.eval_shape(both, q, k, v)
    return tuple(recorder.tiles)


@dataclass(frozen=True, eq=False)
class _Recorder:
    """A kernel that notes what it is handed and passes it on.

    Attributes:
      kernel: takes every case.
      tiles: what was noted; a dict for its order.
    """

    kernel: Kernel
    tiles: dict[Tile, None]

    def forward(self, *arguments: Any) -> SoftmaxState:
        self._note("forward", arguments)
        return self.kernel.forward(*arguments)

    def backward(self, *arguments: Any) -> Gradients:
        self._note("backward", arguments)
        return self.kernel.backward(*arguments)

    def _note(self, direction: Literal["forward", "backward"], arguments: tuple[Any, ...]) -> None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        self.tiles[Tile(direction, shapes)] = None
