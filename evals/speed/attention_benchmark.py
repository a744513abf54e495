"""Benchmark of attention implementations on one problem, relative to each other and to matrix products.

Operations are those that the mask needs: 4 * T * T * N * H for a forward pass, two products over all pairs,
half as many with a causal mask, and 3.5 times as many for forward and backward (five more products, one of
which repeats the scores). Further operations of an implementation, such as masked scores, do not count.

The reference is a product of two square matrices in the problem's dtype on one device, timed before
each implementation in each round. ``share_of_matmul`` is an implementation's rate over this rate: a
share of what the machine reaches under its present load. Simulated devices share one processor, so for
them the rate is that of all devices together; otherwise it is per device.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory, check_memory
from agentic_ring.errors import AgenticRingError, ArgumentError, MeshError
from evals.speed.interleaved import Spread, time_interleaved

Dtype = Literal["float32", "bfloat16", "float16"]
Direction = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

MATMUL = {"cpu": 2048}
"""Rows and columns of the reference product's matrices, by platform."""
MATMUL_ELSEWHERE = 8192


class UnsupportedError(AgenticRingError):
    """An implementation cannot compute the problem; the message says why."""


@dataclass(frozen=True)
class Problem:
    """One layer of self-attention, batch 1.

    Attributes:
      tokens: sequence length, T.
      heads: number of query heads, N.
      kv_heads: number of key and value heads.
      head_dim: size of a head, H.
      dtype: type of q, k, v and the output.
      causal: whether a query attends to its own and earlier keys only, or to all keys.
    """

    tokens: int
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    dtype: Dtype = "float32"
    causal: bool = True

    def __post_init__(self):
        for name in ("tokens", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads}, no multiple of kv_heads {self.kv_heads}; choose numbers that divide"
            )

    def flops(self, direction: Direction) -> float:
        """Returns the operations that the mask needs; see the module."""
        pairs = self.tokens**2 / (2 if self.causal else 1)
        forward = 4 * pairs * self.heads * self.head_dim
        return forward if direction == "forward" else 3.5 * forward

    def arrays(self, sharding: Sharding) -> tuple[jax.Array, ...]:
        """Returns standard normal (q, k, v, d_output) with this sharding."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)

        def make(key: jax.Array) -> tuple[jax.Array, ...]:
            keys = jax.random.split(key, len(heads))
            shapes = [(1, self.tokens, count, self.head_dim) for count in heads]
            return tuple(
                jax.random.normal(k, shape, self.dtype) for k, shape in zip(keys, shapes, strict=True)
            )

        return jax.jit(make, out_shardings=sharding)(jax.random.key(0))


@dataclass(frozen=True)
class Implementation:
    """An implementation of attention.

    Attributes:
      name: its name in tables.
      forward: function of (q, k, v).
      both: function of (q, k, v, d_output) that returns the output and the three gradients.
      sharding: sharding of the arguments; one device by default.
    """

    name: str
    forward: Callable[..., Any]
    both: Callable[..., Any]
    sharding: Sharding = field(default_factory=lambda: SingleDeviceSharding(jax.devices()[0]))

    @classmethod
    def of(
        cls, name: str, attend: Callable[..., jax.Array], sharding: Sharding | None = None
    ) -> "Implementation":
        """Makes an implementation of a differentiable function of (q, k, v)."""

        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
            output, transpose = jax.vjp(attend, q, k, v)
            return output, *transpose(d_output)

        return cls(name, attend, both) if sharding is None else cls(name, attend, both, sharding)


def square_product(dtype: Any) -> Callable[[], Any]:
    """Returns a function that computes the reference product on one device."""
    square = jnp.ones((_matmul_size(), _matmul_size()), dtype, device=jax.devices()[0])
    return partial(jax.jit(jnp.matmul), square, square)


def square_product_flops() -> float:
    """Returns the operations of the reference product."""
    return 2 * _matmul_size() ** 3


def _matmul_size() -> int:
    return MATMUL.get(jax.default_backend(), MATMUL_ELSEWHERE)


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one implementation in one direction.

    Attributes:
      problem: the problem that was computed.
      contender: name of the implementation.
      direction: "forward" or "forward+backward".
      devices: number of devices that shared the work.
      temp_bytes: planned temporary bytes per device.
      seconds: seconds per call.
      flop_rate: operations per second of all devices, at the median of the seconds.
      matmul_rate: operations per second of the reference product on one device, likewise.
      share_of_matmul: see the module.
      ratios: seconds over those of another implementation in the same round; below 1 is faster.
      turns: number of timed rounds.
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
            cells |= spread.cells(name)
        return cells


@dataclass(frozen=True)
class _Program:
    """One implementation in one direction, compiled."""

    implementation: Implementation
    direction: Direction
    run: Callable[[], Any]
    temp_bytes: int


def benchmark(
    problem: Problem,
    implementations: Sequence[Implementation],
    references: Sequence[str],
    rounds: int,
    calls: int = 1,
    directions: Sequence[Direction] = DIRECTIONS,
) -> tuple[list[SpeedRow], list[str]]:
    """Times every implementation that can compute the problem.

    Args:
      problem: the problem to compute.
      implementations: those to time.
      references: names of the implementations that all are compared with.
      rounds: number of timed rounds.
      calls: calls of each implementation per round; see ``time_interleaved``.
      directions: directions to time, by default forward and forward+backward.

    Returns:
      The rows, and a line for each implementation and direction that was left out, with the reason: it
      does not support the problem, or needs more memory than there is.

    Raises:
      ArgumentError: fewer than one round or call.
    """
    for name, count in (("turns", rounds), ("calls", calls)):
        if count < 1:
            raise ArgumentError(f"{name} is {count}; it must be at least 1")
    programs: list[_Program] = []
    refusals: dict[str, list[str]] = {}
    arrays = {sharding: problem.arrays(sharding) for sharding in {each.sharding for each in implementations}}
    for implementation in implementations:
        for direction in directions:
            try:
                programs.append(_compile(implementation, direction, arrays[implementation.sharding]))
            except (UnsupportedError, MeshError, DoesNotFitError) as reason:
                refusals.setdefault(f"{implementation.name}: {reason}", []).append(direction)
    left_out = [f"{line} ({', '.join(refused)})" for line, refused in refusals.items()]
    multiply = square_product(problem.dtype)
    # The reference before each program, not once per round: the load may change within a round.
    functions = [function for program in programs for function in (multiply, program.run)]
    times = time_interleaved(rounds, *functions, calls=calls)
    rates = [[square_product_flops() / seconds for seconds in products] for products in times[::2]]
    measured = {
        (program.implementation.name, program.direction): seconds
        for program, seconds in zip(programs, times[1::2], strict=True)
    }
    rows = []
    for program, matmul_rates in zip(programs, rates, strict=True):
        name, direction = program.implementation.name, program.direction
        others = {other: measured[other, direction] for other in references if (other, direction) in measured}
        others.pop(name, None)
        rows.append(_row(problem, program, measured[name, direction], matmul_rates, others))
    return rows, left_out


def _row(
    problem: Problem,
    program: _Program,
    seconds: list[float],
    matmul_rates: list[float],
    others: dict[str, list[float]],
) -> SpeedRow:
    """Summarises the measurements of one program; the lists have one number per round."""
    flops = problem.flops(program.direction)
    devices = len(program.implementation.sharding.device_set)
    processors = devices if jax.default_backend() != "cpu" else 1
    spread = Spread.of(seconds)
    return SpeedRow(
        problem=problem,
        contender=program.implementation.name,
        direction=program.direction,
        devices=devices,
        temp_bytes=program.temp_bytes,
        seconds=spread,
        flop_rate=flops / spread.median,
        matmul_rate=Spread.of(matmul_rates).median,
        share_of_matmul=Spread.of(
            flops / (x * rate * processors) for x, rate in zip(seconds, matmul_rates, strict=True)
        ),
        ratios={
            name: Spread.of(x / y for x, y in zip(seconds, other, strict=True))
            for name, other in others.items()
        },
        turns=len(seconds),
    )


def _compile(implementation: Implementation, direction: Direction, arrays: tuple[jax.Array, ...]) -> _Program:
    """Compiles one direction, and checks that it fits before anything runs."""
    function = implementation.forward if direction == "forward" else implementation.both
    arguments = arrays[:3] if direction == "forward" else arrays
    compiled = jax.jit(function).lower(*arguments).compile()
    memory, devices = PlannedMemory.of(compiled), len(implementation.sharding.device_set)
    check_memory(memory.total * devices, devices)
    return _Program(implementation, direction, partial(compiled, *arguments), memory.temporary)
