"""What a whole training step sends, and whether products hide it: read from the compiled schedule.

    python evals/step_overlap.py --hardware TPUv5e-256 --model 7B --context 2048k

compiles the training step of ``llama_step`` for a machine that need not be there, and adds up every
collective by kind and pass: hops of the ring, gathers of weights, sums of their gradients. Exposed are those
that nothing but waiting is scheduled for: synchronous ones, and asynchronous ones without a product between
start and done.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console
from rich.table import Table

from agentic_ring import cli
from agentic_ring.token_units import parse_tokens
from evals.common.rows import write_rows
from evals.compile.llama_step import LlamaStep, Method, Precision
from evals.compile.machines import machine
from evals.overlap import Instruction, Program, first_array, in_flight, parse

KINDS = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")
SMALL = 2**16
"""Bytes below which a collective is latency alone: counters, norms, positions."""


@dataclass(frozen=True)
class Sent:
    """All collectives of one kind in one pass.

    Attributes:
      kind: of ``KINDS``.
      backward: whether they are of the backward.
      count: how often they run in a step.
      size: bytes of their results in a step, on a device.
      exposed_count, exposed_size: of them those that no product hides.
    """

    kind: str
    backward: bool
    count: int = 0
    size: int = 0
    exposed_count: int = 0
    exposed_size: int = 0

    def with_one(self, times: int, size: int, hidden: bool) -> "Sent":
        """One more instruction, which runs so often."""
        return Sent(
            self.kind,
            self.backward,
            self.count + times,
            self.size + times * size,
            self.exposed_count + (0 if hidden else times),
            self.exposed_size + (0 if hidden else times * size),
        )


def sent(text: str, smallest: int = SMALL) -> list[Sent]:
    """What ``jax.stages.Compiled.as_text()`` sends, but for arrays smaller than ``smallest`` bytes."""
    program = parse(text)
    totals: dict[tuple[str, bool], Sent] = {}
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
            totals[key] = totals.get(key, Sent(kind, backward)).with_one(times, size, hidden)
    return [totals[key] for key in sorted(totals)]


def _collective(program: Program, step: Instruction) -> Instruction | None:
    """The collective that an instruction is, or that it starts by calling it; None for others."""
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
    """Prints what a training step sends, and how much of it nothing hides.

    Args:
      hardware: A machine that need not be here, such as TPUv5e-256 or 8xH100.
      model: From 3B to 65B.
      context: Tokens of a sequence, such as 2048k.
      method: Which of the four ways to attend.
      precision: Of products and activations.
      remat: What the backward computes again.
      compiler_options: XLA flags and their values, such as
        xla_gpu_experimental_parallel_collective_overlap_limit 2, without which the GPU compiler keeps one
        transfer in flight at a time.
      rows_to: CSV file to write.
    """
    jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    named = machine(hardware)
    described = named.compile_target()
    options = {**described.compiler_options, **compiler_options}
    described = replace(described, compiler_options=options)
    step = LlamaStep(model, method, parse_tokens(context), described.devices, precision, remat=remat)
    compiled = described.compile(step.train_step.lower())
    table = Table("pass", "kind", "times a step", "MB a layer", "exposed", "exposed MB a layer", "ms a layer")
    rows = []
    layers = step.shape.layers
    for total in sent(compiled.as_text() or ""):
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
        f"{model}, {method}, {step.context:,} tokens on {hardware}; ms: the exposed bytes over one link of "
        f"{named.hardware.link_bandwidth / 1e9:.0f} GB/s; arrays under {SMALL // 1024} KiB left out"
    )
    if rows_to is not None:
        write_rows(rows_to, rows)


if __name__ == "__main__":
    cli.run(main)
