"""Benchmark of the attention strategies, and of other libraries' attention, in time and memory.

    python evals/attention_speed.py --tokens 8192 32768 --rows-to attention.csv --plot attention.png

Causal, batch 1, forward and forward+backward. Implementations are timed interleaved, each after a matrix
product; ``evals.speed.attention_benchmark`` says how operations are counted and rates compared, and
``evals.speed.peers`` which other libraries there are. An implementation that does not support a problem,
or needs more memory than the machine has, is left out with the reason: jax.nn beyond the length whose
T x T scores fit. On simulated devices a transfer is a copy within one memory, so the comparison is of
compute, balance between devices, and overheads.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.attention import Strategy, attention
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from evals.speed.attention_benchmark import (
    Dtype,
    Implementation,
    Problem,
    SpeedRow,
    UnsupportedError,
    benchmark,
)
from evals.speed.attention_speed_plot import plot_speed
from evals.speed.peers import PEERS, peer
from evals.speed.speed_table import print_rows

SHARDED: tuple[Strategy, ...] = ("ring", "all_gather", "ulysses", "ulysses_ring")
LOCAL = "ours local"


def attention_speed(
    problem: Problem,
    devices: int = 8,
    strategies: Sequence[Strategy] = SHARDED,
    peers: Sequence[str] = PEERS,
    kernel: str = "auto",
    turns: int = 5,
    calls: int = 1,
) -> tuple[list[SpeedRow], list[str]]:
    """Times our strategies and other libraries on one problem.

    The flags of ``main`` describe the arguments. Attention on one device is always timed.

    Returns:
      The rows, and a line for each implementation that was left out.

    Raises:
      ArgumentError: the tokens do not divide over the devices, or a kernel of another platform.
      MeshError: there are not so many devices.
      UnknownNameError: an unknown peer or kernel.
    """
    for name in peers:
        if name not in PEERS:
            raise UnknownNameError("peer", name, PEERS)
    select_kernel(kernel)
    mesh = make_mesh(MeshShape(ring=devices), jax.devices()[:devices])
    if problem.tokens % devices:
        raise ArgumentError(
            f"tokens is {problem.tokens}, which does not divide over {devices} devices; choose a multiple"
        )
    implementations, left_out = _ours(mesh, strategies, kernel), []
    for name in PEERS:
        if name in peers:
            try:
                implementations.append(peer(name, problem, mesh))
            except UnsupportedError as reason:
                left_out.append(f"{name}: {reason}")
    rows, refused = benchmark(problem, implementations, (LOCAL, *peers), turns, calls)
    return rows, left_out + refused


def _ours(mesh: Mesh, strategies: Sequence[Strategy], kernel: str) -> list[Implementation]:
    sequence = NamedSharding(mesh, PartitionSpec(None, "ring"))
    sharded = [
        Implementation.of(
            f"ours {name}", partial(attention, mesh=mesh, strategy=name, kernel=kernel), sequence
        )
        for name in strategies
    ]
    return [*sharded, Implementation.of(LOCAL, partial(attention, kernel=kernel))]


def main(
    tokens: tuple[int, ...] = (8192, 32768),
    devices: int = 8,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: Dtype = "float32",
    strategies: tuple[Strategy, ...] = SHARDED,
    peers: tuple[str, ...] = PEERS,
    kernel: str = "auto",
    turns: int = 5,
    calls: int = 1,
    rows_to: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Times attention at each length and prints seconds, rates, memory, and ratios to other libraries.

    Args:
      tokens: Sequence lengths; each is measured separately.
      devices: Number of devices of the ring; simulated where there is only a CPU.
      heads: Number of query heads.
      kv_heads: Number of key and value heads; as many as query heads if left out.
      head_dim: Size of a head.
      dtype: Type of all arrays, and of the matrix product that rates are compared with.
      strategies: Our strategies to time, beside attention on one device.
      peers: Other libraries to time: jax.nn, ringattention, or none.
      kernel: Kernel of our own implementations.
      turns: Timed rounds; medians are reported with minimum and maximum.
      calls: Calls of each implementation per round; about ten on a GPU.
      rows_to: CSV file for the rows; none is written if left out.
      plot: PNG file for the plot of time and memory against length; none is drawn if left out.
    """
    simulate_cpu_devices(devices)
    rows: list[SpeedRow] = []
    for length in tokens:
        problem = Problem(length, heads, heads if kv_heads is None else kv_heads, head_dim, dtype)
        found, left_out = attention_speed(problem, devices, strategies, peers, kernel, turns, calls)
        title = f"causal, {length:,} tokens, {heads} heads of {head_dim}, {dtype}, on {devices} devices"
        print_rows(title, found, left_out)
        rows += found
        if rows_to is not None:  # after each length, as the next may take long
            write_rows(rows_to, [row.columns() for row in rows])
    if plot is not None:
        plot_speed(plot, [row.columns() for row in rows])


if __name__ == "__main__":
    cli.run(main)
