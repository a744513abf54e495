"""Overhead of the ring code over its kernel on one GPU, and speed of a long sequence on one GPU.

    python evals/gpu_attention_speed.py --rows-to gpu.csv

Two sections, each forward and forward+backward, timed as in ``evals.speed.attention_benchmark``:

1. One call of the bare kernel; ``attention`` on one device (the same call with everything around it); all
   hops of all devices of a ring, one after another on this GPU; and JAX's own cuDNN attention. A ring that
   overlaps its transfers takes as long as its hops, so the third is the speed that a ring can reach: smaller
   tiles, merges in float32, and the sums of gradients.
2. One layer of ``attention`` over a long sequence.

On another platform give its kernel and small sizes: ``--kernel xla --tokens 1024 --long-tokens 0 ...``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from agentic_ring.attention import attention
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.errors import ArgumentError
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from evals.speed.attention_benchmark import Dtype, Implementation, Problem, SpeedRow, benchmark
from evals.speed.one_device_ring import EmulatedRing, OneCall
from evals.speed.speed_table import print_rows

BARE = "bare kernel"


def ring_on_one_device(kernel: str, devices: int, tokens: int) -> list[Implementation]:
    """Returns the implementations of the first section.

    Args:
      kernel: one of ``agentic_ring.attention.KERNELS``.
      devices: number of devices of the emulated ring.
      tokens: sequence length, a multiple of twice as many.

    Raises:
      ArgumentError: the tokens do not divide, or a kernel of another platform.
      UnknownNameError: an unknown kernel.
    """
    if tokens % (2 * devices):
        raise ArgumentError(
            f"tokens is {tokens}, which does not divide over a zigzag ring of {devices}; "
            f"choose a multiple of {2 * devices}"
        )
    selected = select_kernel(kernel)
    bare, ring = OneCall(selected), EmulatedRing(selected, devices)
    implementations = [
        Implementation(BARE, bare.forward, bare.both),
        _local(kernel),
        Implementation(f"emulated ring of {devices}", ring.forward, ring.both),
    ]
    if kernel == "cudnn":
        jax_cudnn: Callable[..., jax.Array] = partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
        implementations.append(Implementation.of("jax.nn cudnn", jax_cudnn))
    return implementations


def _local(kernel: str) -> Implementation:
    return Implementation.of("ours local", partial(attention, kernel=kernel))


def main(
    tokens: int = 16_384,
    long_tokens: int = 524_288,
    ring: int = 8,
    heads: int = 16,
    kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: Dtype = "bfloat16",
    kernel: str = "cudnn",
    turns: int = 10,
    calls: int = 10,
    rows_to: Path | None = None,
) -> None:
    """Times a kernel, the code around it and an emulated ring on one device, then a long sequence.

    Args:
      tokens: Sequence length of the first section; a multiple of twice the ring.
      long_tokens: Sequence length of the second section; 0 leaves the section out.
      ring: Number of devices of the emulated ring.
      heads: Number of query heads.
      kv_heads: Number of key and value heads; as many as query heads if left out.
      head_dim: Size of a head.
      dtype: Type of all arrays, and of the matrix product that rates are compared with.
      kernel: Kernel of all implementations except JAX's.
      turns: Timed rounds of the first section; the second has a third of them.
      calls: Calls of each implementation per round of the first section; the second has one.
      rows_to: CSV file for the rows; none is written if left out.
    """
    problem = Problem(tokens, heads, heads if kv_heads is None else kv_heads, head_dim, dtype)
    sections = [(problem, ring_on_one_device(kernel, ring, tokens), turns, calls)]
    if long_tokens:
        sections.append((replace(problem, tokens=long_tokens), [_local(kernel)], max(1, turns // 3), 1))
    rows: list[SpeedRow] = []
    for problem, implementations, turns, calls in sections:
        found, left_out = benchmark(problem, implementations, (BARE,), turns, calls)
        title = f"causal, {problem.tokens:,} tokens, {heads} heads of {head_dim}, {dtype}, kernel {kernel}"
        print_rows(title, found, left_out)
        rows += found
        if rows_to is not None and rows:
            write_rows(rows_to, [row.columns() for row in rows])


if __name__ == "__main__":
    cli.run(main)
