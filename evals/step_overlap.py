"""Collectives of a whole training step and their overlap with compute, read from the compiled schedule.

    python evals/step_overlap.py --hardware TPUv5e-256 --model 7B --context 2048k

compiles the training step of ``evals.compile.llama_step`` ahead of time for a machine, and adds up every
collective by kind and pass: hops of the ring, gathers of weights, sums of their gradients. Exposed
collectives are those that no matrix product overlaps: synchronous ones, and asynchronous ones without a
product between start and done.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console
from rich.table import Table

from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from agentic_ring.token_units import parse_tokens
from evals.compile.collective_schedule import Instruction, Program, first_array, in_flight, parse
from evals.compile.llama_step import LlamaStep, Method, Precision
from evals.compile.machines import machine

KINDS = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")
SMALL = 2**16
"""Bytes below which the time of a collective is only latency: counters, norms, positions."""


@dataclass(frozen=True)
class CollectiveTotal:
    """Sum over all collectives of one kind in one pass.

    Attributes:
      kind: one of ``KINDS``.
      backward: whether they belong to the backward pass.
      count: number of runs per step.
      size: bytes of their results per step and device.
      exposed_count, exposed_size: the part that no matrix product overlaps.
    """

    kind: str
    backward: bool
    count: int = 0
    size: int = 0
    exposed_count: int = 0
    exposed_size: int = 0

    def with_one(self, times: int, size: int, hidden: bool) -> "CollectiveTotal":
        """Returns the sum with one more instruction, which runs ``times`` times per step."""
        return CollectiveTotal(
            self.kind,
            self.backward,
            self.count + times,
            self.size + times * size,
            self.exposed_count + (0 if hidden else times),
            self.exposed_size + (0 if hidden else times * size),
        )


def collective_totals(text: str, smallest: int = SMALL) -> list[CollectiveTotal]:
    """Adds up the collectives of ``jax.stages.Compiled.as_text()`` of at least ``smallest`` bytes."""
    program = parse(text)
    totals: dict[tuple[str, bool], CollectiveTotal] = {}
    for _, times, steps in program.walk():
        for place, step in enumerate(steps):
            collective = _collective(program, step)
            if collective is None:
                continue
            kind = collective.opcode.removesuffix("-start")
            size = first_array(collective.type)[1]
            if size < smallest:
                continue
            backward = "transpose(" in collective.attributes
            hidden = any(program.matmuls(other) for other in in_flight(steps, place))
            key = kind, backward
            totals[key] = totals.get(key, CollectiveTotal(kind, backward)).with_one(times, size, hidden)
    return [totals[key] for key in sorted(totals)]


def _collective(program: Program, step: Instruction) -> Instruction | None:
    """Returns the collective that an instruction is, or starts by a call; None for others."""
    if step.opcode.removesuffix("-start") in KINDS:
        return step
    if step.opcode != "async-start":
        return None
    inner: Iterable[Instruction] = (
        other for name in step.called for other in program.computations.get(name, ())
    )
    return next((other for other in inner if other.opcode in KINDS), None)


def main(
    hardware: str,
    model: str,
    context: str,
    method: Method = "ring",
    precision: Precision = "bfloat16",
    remat: Literal["full", "offload", "attention"] = "full",
    compiler_options: dict[str, str] = {},  # noqa: B006 (never changed)
    rows_to: Path | None = None,
) -> None:
    """Prints the collectives of a training step, and how much of them is exposed.

    Args:
      hardware: Machine to compile for, such as TPUv5e-256 or 8xH100; it need not be present.
      model: Size of the model, from 3B to 65B.
      context: Tokens per sequence, such as 2048k.
      method: Attention method.
      precision: Type of matrix products and activations.
      remat: What the backward pass computes again: full recomputes each layer, offload also keeps the
        layer's input in host memory, attention keeps the output of attention.
      compiler_options: XLA flags and their values, such as
        xla_gpu_experimental_parallel_collective_overlap_limit 2. Without it the GPU compiler keeps one
        transfer in flight at a time.
      rows_to: CSV file for the rows; none is written if left out.
    """
    jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    named = machine(hardware)
    target = named.compile_target()
    options = {**target.compiler_options, **compiler_options}
    target = replace(target, compiler_options=options)
    step = LlamaStep(model, method, parse_tokens(context), target.devices, precision, remat=remat)
    compiled = target.compile(step.train_step.lower())
    table = Table("pass", "kind", "times/step", "MB/layer", "exposed", "exposed MB/layer", "exposed ms/layer")
    rows = []
    layers = step.shape.layers
    for total in collective_totals(compiled.as_text() or ""):
        exposed_seconds = total.exposed_size / layers / named.hardware.link_bandwidth
        table.add_row(
            "backward" if total.backward else "forward",
            total.kind,
            str(total.count),
            f"{total.size / layers / 1e6:.1f}",
            str(total.exposed_count),
            f"{total.exposed_size / layers / 1e6:.1f}",
            f"{1e3 * exposed_seconds:.2f}",
        )
        rows.append({"machine": hardware, "model": model, "context": step.context, **vars(total)} | options)
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{model}, {method}, {step.context:,} tokens on {hardware}; exposed ms: the exposed bytes over one "
        f"link of {named.hardware.link_bandwidth / 1e9:.0f} GB/s; arrays under {SMALL // 1024} KiB left out"
    )
    if rows_to is not None:
        write_rows(rows_to, rows)


if __name__ == "__main__":
    cli.run(main)
