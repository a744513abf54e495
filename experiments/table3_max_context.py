"""Maximum context length of each method on each machine (Table 3), by ahead-of-time compilation.

    python experiments/table3_max_context.py                                  # the whole table
    python experiments/table3_max_context.py --hardware TPUv5e-256 --model 7B # some rows
    python experiments/table3_max_context.py --hardware TPUv5e-256 --model 7B --method ring --check 2048k

compiles this project's training step of a LLaMA for machines that need not be present, and finds the
longest power of two of tokens whose program fits a device. Needs the extras aot (TPUs) and cuda13 (GPUs).
"""

import itertools
import os
from pathlib import Path
from typing import Annotated, Literal, cast

import jax
from rich.console import Console

from agentic_ring.errors import ArgumentError, ConfigError, UnknownNameError
from agentic_ring.files.run_folder import only_writer
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import progress
from agentic_ring.token_units import parse_tokens, thousands
from evals.compile.llama_step import METHODS, SHAPES, Method, Precision
from evals.compile.machines import MACHINES, machine
from evals.compile.maximum_context import COMPILE_SECONDS, ContextCell, Finding, Program, search
from experiments import paper
from experiments.common.cells import CellPool
from experiments.table3.table import COLUMNS, plot_contexts, plot_memory, table_rows, text_table, write_table

BEYOND_THE_PAPER = (
    ("4xH100", "8B"),
    ("8xH100", "7B"),
    ("8xH100", "13B"),
    ("8xH200", "7B"),
    ("8xH200", "13B"),
    ("8xH200", "30B"),
    ("TPUv5p-256", "7B"),
    ("TPUv6e-256", "7B"),
    ("TPU7x-256", "7B"),
    ("TPUv5p-256", "65B"),
)
"""Rows beyond the paper: current machines, and Llama-3-8B on the four GPUs of a published PyTorch report."""


def context_program(cell: ContextCell, tokens: int) -> Program:
    """Returns a cell at one context, which a process compiles by this script's ``--check``."""
    step = cell.step(tokens, (None,) * cell.machine.devices)
    flags = (
        f"--hardware {cell.hardware} --model {cell.model} --method {cell.method} "
        f"--precision {cell.precision} --check {tokens} "
        f"--inputs {'host' if cell.remat == 'offload' else 'device'}"
    )
    return Program(
        name=f"{cell} at {thousands(tokens)}",
        machine=cell.machine,
        context=tokens,
        configuration=repr((step.config, step.batch)),
        train_step=lambda devices: cell.step(tokens, devices).train_step,
        arguments=(__file__, *flags.split()),
    )


def all_rows() -> list[tuple[str, str]]:
    """Returns the (hardware, model) of every row: the paper's rows, then ours."""
    names = {named.paper: named.name for named in MACHINES.values() if named.paper}
    return [(names[hardware], model) for hardware, model in paper.longest_contexts()] + list(BEYOND_THE_PAPER)


def print_finding(cell: ContextCell, finding: Finding) -> None:
    """Prints what ``--check`` found; the last line is the verdict."""
    named, state = cell.machine, finding.state
    print(f"{cell}, {finding.context:,} tokens per sequence")
    print(f"compiled for {named.devices} x {named.hardware.name}{', ' + named.note if named.note else ''}")
    if state is not None:
        print(f"parameters, optimiser and batch {state:,} bytes per device, host memory {finding.host:,}")
    if finding.message:
        print(finding.message)
    needed = "unknown" if finding.needed is None else f"{finding.needed:,.0f}"
    rest = f"bytes per device of {finding.limit:,.0f}, {finding.seconds:.0f} seconds"
    print(f"{finding.verdict}: {needed} {rest}")


def main(
    hardware: Annotated[tuple[str, ...], cli.optional_flag(metavar="NAME")] = (),
    model: Annotated[tuple[str, ...], cli.optional_flag(metavar="NAME")] = (),
    method: Annotated[tuple[str, ...], cli.optional_flag(metavar="NAME")] = (),
    precision: Literal["paper", "float32", "bfloat16"] = "paper",
    inputs: Annotated[Literal["device", "host"] | None, cli.optional_flag(metavar="{device,host}")] = None,
    check: Annotated[str | None, cli.optional_flag(metavar="TOKENS")] = None,
    output: Path = Path("runs/table3"),
    workers: int = max(1, (os.cpu_count() or 1) // 2),
) -> None:
    """Compiles training steps for machines and prints the maximum contexts beside the paper's.

    Args:
      hardware: Machines, such as TPUv5e-256. Default: those of all rows.
      model: Models, from 3B to 65B. Default: those of the rows.
      method: Attention methods: vanilla, memory_efficient, blockwise, ring. Default: all.
      precision: Type of matrix products and activations; "paper" is float32 on the paper's GPUs and
        bfloat16 elsewhere.
      inputs: Memory that holds each layer's input until the backward pass. Default: the table has both for
        the ring, a check takes the device.
      check: Compile only one context, such as 2048k, of one machine, model and method.
      output: Folder of the findings, which a later run reads, and of table.csv, table.md and plots.
      workers: Programs compiled at a time; each takes a few GB and about one core.
    """
    jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    for name in hardware:
        machine(name)
    for kind, names, known in (("model", model, tuple(SHAPES)), ("method", method, METHODS)):
        if unknown := [name for name in names if name not in known]:
            raise UnknownNameError(kind, unknown[0], known)
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1")

    def precision_on(name: str) -> Precision:
        if precision != "paper":
            return precision
        named = machine(name)
        return "float32" if named.paper and named.hardware.platform == "cuda" else "bfloat16"

    if check is not None:
        if not len(hardware) == len(model) == len(method) == 1:
            raise ArgumentError("--check compiles one cell: give one --hardware, --model and --method")
        remat = "offload" if inputs == "host" else "full"
        cell = ContextCell(hardware[0], model[0], cast(Method, method[0]), precision_on(hardware[0]), remat)
        print_finding(cell, context_program(cell, parse_tokens(check)).compile_here(output))
        return
    # The rows of the table, and any other pair of the flags.
    pairs = dict.fromkeys([*all_rows(), *itertools.product(hardware, model)])
    rows = [
        (name, size) for name, size in pairs if name in (hardware or [name]) and size in (model or [size])
    ]
    cells = [
        ContextCell(name, size, column.method, precision_on(name), column.remat)
        for column in COLUMNS
        for name, size in rows
        if (not method or column.method in method)
        and (inputs is None or (inputs == "host") == (column.remat == "offload"))
    ]
    done: dict[ContextCell, list[Finding]] = {}
    with only_writer(output):
        with progress("cells", len(cells)) as advance, CellPool(output, workers, COMPILE_SECONDS) as pool:

            def findings(cell: ContextCell) -> list[Finding]:
                return list(search(cell, lambda n: context_program(cell, n).compiled(output, pool.run)))

            for cell, found in pool.each(findings, cells):
                done[cell] = found
                ends = sorted((finding.context, finding.verdict) for finding in found)
                advance(len(done), f"{cell}: {', '.join(f'{thousands(n)} {verdict}' for n, verdict in ends)}")
                write_table(output, table_rows(rows, done))
        finished = table_rows(rows, done)
        plot_contexts(output / "contexts.png", finished)
        plot_memory(output / "memory.png", finished)
    table = text_table(finished)
    Console(width=150).print(table.rich())  # also in narrower terminals: wrapped cells are hard to read
    print("\n".join(table.notes))
    print(f"written to {output}: table.md, table.csv, findings.csv, contexts.png and memory.png")


if __name__ == "__main__":
    cli.run(main)
