"""What is decided about one call of ``attention`` before anything is computed."""

import math
from dataclasses import dataclass
from typing import Literal

from jax.sharding import AbstractMesh, Mesh

from agentic_ring.attention.arguments import ArrayLike
from agentic_ring.attention.choose_strategy import Choice, Shapes, choose_strategy, refusal, ulysses_degree
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.placement import Placement, place
from agentic_ring.attention.platform import mesh_platform
from agentic_ring.attention.ring.layout import LAYOUTS, Layout
from agentic_ring.attention.ring.transport import SCHEDULES, Schedule
from agentic_ring.attention.strategies import STRATEGIES, Sharded, Strategy
from agentic_ring.errors import ArgumentError, MeshError, UnknownNameError
from agentic_ring.mesh import ShardingRules


@dataclass(frozen=True)
class Plan:
    """What is static about one call."""

    placement: Placement
    sharded: Sharded
    scale: float | None
    soft_cap: float | None
    dropout_rate: float

    def padded(self, length: int) -> int:
        """The length that spreads evenly over the devices in this layout and schedule."""
        devices, sharded = self.placement.ring, self.sharded
        ring = devices // sharded.ulysses
        # Tokens are dealt into stripes device by device, so each device's block has to divide as well.
        pieces = {"contiguous": 1, "striped": ring, "zigzag": 2}[sharded.layout] if ring > 1 else 1
        quarters = 4 if sharded.schedule == "bidirectional" and ring > 1 else 1
        multiple = math.lcm(devices, ring * pieces, ring * quarters)
        return -(-length // multiple) * multiple

    def check_permuted(self, rules: ShardingRules, *lengths: int) -> None:
        """A caller who permuted the sequence has done so for the devices that share it, and has padded it."""
        mesh, layout = self.placement.mesh, self.sharded.layout
        devices = 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in rules.sequence)
        if devices != self.placement.ring and layout != "contiguous":
            raise ArgumentError(
                f"permuted=True says that the sequence lies in {layout} order over {devices} devices, but "
                "each works on whole sequences here (strategy local); pass positions, or another strategy"
            )
        for length in lengths:
            if self.placement.ring > 1 and self.padded(length) != length:
                raise ArgumentError(
                    f"permuted=True with {length} tokens, which do not spread evenly over "
                    f"{self.placement.ring} devices in {self.sharded.layout} order; pad them to "
                    f"{self.padded(length)} before permuting (agentic_ring.attention.padded_length)"
                )


@dataclass(frozen=True)
class Decision:
    """A plan, and what it was decided from.

    Attributes:
      plan: what will run.
      shapes: sizes a device.
      platform: "cpu", "gpu" or "tpu".
      choice: the strategy and why.
    """

    plan: Plan
    shapes: Shapes
    platform: str
    choice: Choice


def decide(
    q: ArrayLike,
    k: ArrayLike,
    *,
    mesh: Mesh | AbstractMesh | None,
    rules: ShardingRules,
    mask: MaskSpec,
    counted: bool,
    scale: float | None,
    soft_cap: float | None,
    dropout_rate: float,
    strategy: Strategy | Literal["auto"],
    schedule: Schedule,
    layout: Layout | Literal["auto"],
    permuted: bool,
    kernel: str,
    query_chunk: int | None,
    key_chunk: int | None,
) -> Decision:
    """Decides how a call with these arguments runs; of q and k only shape and dtype matter.

    Args:
      q, k: checked already.
      counted: whether positions are counted from 0, for want of others.
      mesh, rules, mask, scale, soft_cap, dropout_rate, strategy, schedule, layout, permuted, kernel,
        query_chunk, key_chunk: as in ``attention``.

    Raises:
      ArgumentError, MeshError, UnknownNameError: as in ``attention``.
    """
    for kind, name, known in (
        ("strategy", strategy, ("auto", *STRATEGIES)),
        ("schedule", schedule, SCHEDULES),
        ("layout", layout, ("auto", *LAYOUTS)),
    ):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    placement = place(mesh, rules, q.shape, k.shape, strategy)
    platform = mesh_platform(placement.mesh)
    rows, heads, key_heads = placement.local((q.shape[0], q.shape[2], k.shape[2]))
    shapes = Shapes(
        ring=placement.ring,
        inner=placement.inner,
        batch=rows,
        tokens=-(-q.shape[1] // placement.ring),
        heads=heads,
        key_heads=key_heads,
        head_dim=q.shape[3],
        itemsize=q.dtype.itemsize,
    )
    choice = Choice(strategy, "asked for") if strategy != "auto" else choose_strategy(shapes, mask, platform)
    if (why := refusal(shapes, choice.strategy)) is not None:
        raise MeshError(f'strategy is "{choice.strategy}" but {why}; choose another strategy or mesh')
    balance = mask.causal and mask.window is None and not mask.prefix and counted
    if layout == "auto":
        layout = "zigzag" if balance and placement.ring > 1 and not permuted else "contiguous"
    sharded = Sharded(
        mask=mask,
        kernel=select_kernel(kernel, query_chunk, key_chunk, platform),
        given=layout if permuted else "contiguous",
        layout=layout,
        gather=choice.strategy == "all_gather",
        inner=placement.inner if choice.strategy == "ring" and placement.inner < placement.ring else 1,
        ulysses=ulysses_degree(shapes, choice.strategy),
        schedule=schedule,
    )
    plan = Plan(placement, sharded, None if scale is None else float(scale), soft_cap, float(dropout_rate))
    if permuted:
        plan.check_permuted(rules, q.shape[1], k.shape[1])
    return Decision(plan, shapes, platform, choice)
