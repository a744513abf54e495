"""Attention implementations timed against each other on one problem, and against matrix products.

Operations are counted as the causal mask needs them: 4 * T * T / 2 * N * H for a forward, two products
over half of all pairs, and 3.5 times as many for forward and backward (five more products, one of which
repeats the scores). What an implementation computes beyond that, masked scores for one, earns nothing.

The yardstick is a product of two square matrices in the problem's dtype on one device, timed before
each contender in each turn. ``share_of_matmul`` is an implementation's rate over the yardstick's: a
share of what this machine reaches, whatever else it is doing. Simulated devices share one processor,
so for them the rate is that of all together; else it is a device's.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory, check_memory
from agentic_ring.errors import AgenticRingError, ArgumentError, MeshError
from evals.speed.interleaved import Spread, take_turns

Dtype = Literal["float32", "bfloat16", "float16"]
Direction = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

MATMUL = {"cpu": 2048}
"""Rows and columns of the yardstick's matrices, by platform."""
MATMUL_ELSEWHERE = 8192


class LeftOutError(AgenticRingError):
    """A contender cannot take part; the message says why."""


@dataclass(frozen=True)
class Problem:
    """One layer of causal self-attention, batch 1.

    Attributes:
      tokens: T.
      heads: query heads, N.
      kv_heads: key and value heads.
      head_dim: H.
      dtype: of q, k, v and the output.
    """

    tokens: int
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    dtype: Dtype = "float32"

    def __post_init__(self):
        for name in ("tokens", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads}, no multiple of kv_heads {self.kv_heads}; choose numbers that divide"
            )

    def flops(self, direction: Direction) -> float:
        """Operations of a causal mask; see the module."""
        forward = 4 * self.tokens**2 / 2 * self.heads * self.head_dim
        return forward if direction == "forward" else 3.5 * forward

    def arrays(self, sharding: Sharding) -> tuple[jax.Array, ...]:
        """Standard normal (q, k, v, d_output), made where they are to lie."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)

        def make(key: jax.Array) -> tuple[jax.Array, ...]:
            keys = jax.random.split(key, len(heads))
            shapes = [(1, self.tokens, count, self.head_dim) for count in heads]
            return tuple(
                jax.random.normal(k, shape, self.dtype) for k, shape in zip(keys, shapes, strict=True)
            )

        return jax.jit(make, out_shardings=sharding)(jax.random.key(0))


@dataclass(frozen=True)
class Contender:
    """An implementation of attention.

    Attributes:
      name: in tables.
      forward: of (q, k, v).
      both: of (q, k, v, d_output): the output and the three gradients.
      sharding: of the arrays it is given; on one device where absent.
    """

    name: str
    forward: Callable[..., Any]
    both: Callable[..., Any]
    sharding: Sharding = field(default_factory=lambda: SingleDeviceSharding(jax.devices()[0]))

    @classmethod
    def of(cls, name: str, attend: Callable[..., jax.Array], sharding: Sharding | None = None) -> "Contender":
        """A function of (q, k, v) whose gradients JAX knows."""

        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
            output, transpose = jax.vjp(attend, q, k, v)
            return output, *transpose(d_output)

        return cls(name, attend, both) if sharding is None else cls(name, attend, both, sharding)


@dataclass(frozen=True)
class SpeedRow:
    """One contender, one direction.

    Attributes:
      problem: what was computed.
      contender: its name.
      direction: "forward" or "forward+backward".
      devices: that shared the work.
      temp_bytes: a device's, beside arguments and results, as the compiler planned them.
      seconds: of one call.
      flop_rate: operations a second of all devices, at the median of the seconds.
      matmul_rate: the yardstick's, on one device, likewise.
      share_of_matmul: see the module.
      ratios: seconds over those of another contender in the same turn; below 1 is faster than it.
      turns: that were timed.
    """

    problem: Problem
    contender: str
    direction: Direction
    devices: int
    temp_bytes: int
    seconds: Spread
    flop_rate: float
    matmul_rate: float
    share_of_matmul: Spread
    ratios: dict[str, Spread]
    turns: int

    def columns(self) -> dict[str, Any]:
        """The row as one level of named cells, for a CSV file."""
        cells: dict[str, Any] = {**asdict(self.problem), **vars(self)}
        del cells["problem"], cells["ratios"]
        spreads = {"seconds": self.seconds, "share_of_matmul": self.share_of_matmul}
        spreads |= {f"ratio_to_{name}": spread for name, spread in self.ratios.items()}
        for name, spread in spreads.items():
            cells |= {name: spread.median, f"{name}_low": spread.low, f"{name}_high": spread.high}
        return cells


@dataclass(frozen=True)
class _Entry:
    """One contender in one direction, compiled."""

    contender: Contender
    direction: Direction
    run: Callable[[], Any]
    temp_bytes: int


def contest(
    problem: Problem, contenders: Sequence[Contender], references: Sequence[str], turns: int, calls: int = 1
) -> tuple[list[SpeedRow], list[str]]:
    """Times every contender that can take part, forward and forward+backward.

    Args:
      problem: what is computed.
      contenders: who take turns.
      references: names of those that all are compared with.
      turns: timed ones.
      calls: of each contender a turn; see ``take_turns``.

    Returns:
      The rows, and a line for each contender and direction that was left out, with the reason: it
      does not serve the case, or needs more memory than there is.

    Raises:
      ArgumentError: fewer than one turn or call.
    """
    for name, count in (("turns", turns), ("calls", calls)):
        if count < 1:
            raise ArgumentError(f"{name} is {count}; it must be at least 1")
    entries: list[_Entry] = []
    refusals: dict[str, list[str]] = {}
    arrays = {sharding: problem.arrays(sharding) for sharding in {each.sharding for each in contenders}}
    for contender in contenders:
        for direction in DIRECTIONS:
            try:
                entries.append(_compiled(contender, direction, arrays[contender.sharding]))
            except (LeftOutError, MeshError, DoesNotFitError) as reason:
                refusals.setdefault(f"{contender.name}: {reason}", []).append(direction)
    left_out = [f"{line} ({', '.join(directions)})" for line, directions in refusals.items()]
    size = MATMUL.get(jax.default_backend(), MATMUL_ELSEWHERE)
    square = jnp.ones((size, size), problem.dtype, device=jax.devices()[0])
    multiply = partial(jax.jit(jnp.matmul), square, square)
    # The yardstick before each contender, not once a turn: the machine may change within a turn.
    functions = [function for entry in entries for function in (multiply, entry.run)]
    times = take_turns(turns, *functions, calls=calls)
    rates = [[2 * size**3 / seconds for seconds in yardstick] for yardstick in times[::2]]
    measured = {
        (entry.contender.name, entry.direction): seconds
        for entry, seconds in zip(entries, times[1::2], strict=True)
    }
    rows = []
    for entry, matmul_rates in zip(entries, rates, strict=True):
        name, direction = entry.contender.name, entry.direction
        others = {other: measured[other, direction] for other in references if (other, direction) in measured}
        others.pop(name, None)
        rows.append(_row(problem, entry, measured[name, direction], matmul_rates, others))
    return rows, left_out


def _row(
    problem: Problem,
    entry: _Entry,
    seconds: list[float],
    matmul_rates: list[float],
    others: dict[str, list[float]],
) -> SpeedRow:
    """What was measured of one entry; the lists have one number a turn."""
    flops, devices = problem.flops(entry.direction), len(entry.contender.sharding.device_set)
    yardsticks = devices if jax.default_backend() != "cpu" else 1
    spread = Spread.of(seconds)
    return SpeedRow(
        problem=problem,
        contender=entry.contender.name,
        direction=entry.direction,
        devices=devices,
        temp_bytes=entry.temp_bytes,
        seconds=spread,
        flop_rate=flops / spread.median,
        matmul_rate=Spread.of(matmul_rates).median,
        share_of_matmul=Spread.of(
            flops / (x * rate * yardsticks) for x, rate in zip(seconds, matmul_rates, strict=True)
        ),
        ratios={
            name: Spread.of(x / y for x, y in zip(seconds, other, strict=True))
            for name, other in others.items()
        },
        turns=len(seconds),
    )


def _compiled(contender: Contender, direction: Direction, arrays: tuple[jax.Array, ...]) -> _Entry:
    """Compiles one direction, and refuses what would not fit before anything runs."""
    function = contender.forward if direction == "forward" else contender.both
    arguments = arrays[:3] if direction == "forward" else arrays
    compiled = jax.jit(function).lower(*arguments).compile()
    memory, devices = PlannedMemory.of(compiled), len(contender.sharding.device_set)
    check_memory(memory.total * devices, devices)
    return _Entry(contender, direction, partial(compiled, *arguments), memory.temporary)


def print_rows(title: str, rows: Sequence[SpeedRow], left_out: Sequence[str]) -> None:
    """Prints the rows of one problem as a table, and below it who did not take part."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    references = list(dict.fromkeys(name for row in rows for name in row.ratios))
    figures = ("seconds", "least to greatest", "of matmul", "temp MB a device")
    for column in ("contender", "direction"):
        table.add_column(column)
    for column in (*figures, *(f"time / {name}" for name in references)):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.contender,
            row.direction,
            f"{row.seconds.median:.4g}",
            f"{row.seconds.low:.4g} to {row.seconds.high:.4g}",
            f"{row.share_of_matmul.median:.0%}",
            f"{row.temp_bytes / 1e6:,.1f}",
            *(f"{row.ratios[name].median:.2f}" if name in row.ratios else "" for name in references),
        )
    console = Console(width=160)
    console.print(table)
    if rows:
        rate = statistics.median(row.matmul_rate for row in rows)
        console.print(f"a matrix product: {rate / 1e9:,.0f} GFLOP/s (median)")
    for line in left_out:
        console.print(f"left out: {line}")
