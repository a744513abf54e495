"""The longest context each method trains on each machine (Table 3), asked of the machines' own compilers.

    python experiments/table3_max_context.py                                  # the whole table
    python experiments/table3_max_context.py --hardware TPUv5e-256 --model 7B # some rows
    python experiments/table3_max_context.py --hardware TPUv5e-256 --model 7B --method ring --check 2048k

compiles the product's own training step of a LLaMA for a machine that need not be there, and finds the
longest power of two of tokens whose program fits a device. Needs the extras aot (TPUs) and cuda13 (GPUs).
"""

import os
from pathlib import Path
from typing import Annotated, Literal, cast

import jax
import tyro
from rich.console import Console

from agentic_ring import cli
from agentic_ring.errors import ArgumentError, ConfigError, UnknownNameError
from agentic_ring.progress import progress
from agentic_ring.token_units import parse_tokens
from evals.compile.llama_step import METHODS, SHAPES, Method, Precision
from evals.compile.machines import MACHINES, machine
from evals.compile.maximum_context import Asker, Cell, Finding, Findings, ask, search, sweep
from experiments import paper
from experiments.table3.check_command import check_command
from experiments.table3.plots import plot_contexts, plot_memory
from experiments.table3.table import COLUMNS, contexts_of, table_rows, text_table, write_table

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
"""Machines of today, and Llama-3-8B on the four GPUs of a published PyTorch report."""

TABLE_WIDTH = 150
"""Characters, also where the terminal is narrower or there is none: broken cells are hard to read."""


def paper_precision(hardware: str) -> Precision:
    """The paper's: float32 throughout on its GPUs, products in bfloat16 on TPUs; today's GPUs: bfloat16."""
    named = machine(hardware)
    return "float32" if named.paper and named.hardware.platform == "cuda" else "bfloat16"


def all_rows() -> list[tuple[str, str]]:
    """(hardware, model) of the table: the paper's, then ours."""
    names = {named.paper: named.name for named in MACHINES.values() if named.paper}
    return [(names[hardware], model) for hardware, model in paper.longest_contexts()] + list(BEYOND_THE_PAPER)


def print_finding(finding: Finding) -> None:
    """What ``--check`` prints; the last line is the verdict."""
    cell, named = finding.cell, finding.cell.machine
    print(f"{cell}, {finding.context:,} tokens a sequence")
    print(f"compiled for {named.devices} x {named.hardware.name}{', ' + named.note if named.note else ''}")
    if finding.state is not None:
        print(
            f"parameters, optimiser and batch {finding.state:,} bytes a device; host memory {finding.host:,}"
        )
    if finding.message:
        print(finding.message)
    needed = "unknown" if finding.needed is None else f"{finding.needed:,.0f}"
    print(
        f"{finding.verdict}: {needed} bytes a device of {finding.limit:,.0f}, {finding.seconds:.0f} seconds"
    )


def main(
    hardware: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (),
    model: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (),
    method: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (),
    precision: Literal["paper", "float32", "bfloat16"] = "paper",
    inputs: Literal["device", "host"] | None = None,
    check: str | None = None,
    output: Path = Path("runs/table3"),
    workers: int = max(1, (os.cpu_count() or 1) // 2),
) -> None:
    """Compiles training steps for machines and prints the longest contexts beside the paper's.

    Args:
      hardware: Machines, such as TPUv5e-256; all rows where absent.
      model: Models, from 3B to 65B; those of the rows where absent.
      method: vanilla, memory_efficient, blockwise or ring; all where absent.
      precision: The paper's on each machine (float32 on its GPUs, else bfloat16), or one for all.
      inputs: Where each layer's input waits for the backward; absent, a table has both for the ring, and a
        check takes the device.
      check: Ask about one context only, such as 2048k, of one machine, model and method.
      output: Folder of the answers, which a later run reads, and of table.csv, table.md and plots.
      workers: Programs compiled at a time; each takes a few GB and about a core.
    """
    # Where JAX keeps its constants while it compiles for others.
    jax.config.update("jax_platforms", "cpu")
    for name in hardware:
        machine(name)
    _known("model", model, tuple(SHAPES))
    _known("method", method, METHODS)
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1")

    def precision_on(name: str) -> Precision:
        return paper_precision(name) if precision == "paper" else precision

    findings = Findings(output / "answers")
    if check is not None:
        if not len(hardware) == len(model) == len(method) == 1:
            raise ArgumentError(
                "--check asks about one cell: give one --hardware, one --model and one --method"
            )
        remat = "offload" if inputs == "host" else "full"
        cell = Cell(hardware[0], model[0], cast(Method, method[0]), precision_on(hardware[0]), remat)
        finding = ask(cell, parse_tokens(check))
        findings.put(finding)
        print_finding(finding)
        return
    rows = [
        (name, size)
        for name, size in _rows(hardware, model)
        if (not hardware or name in hardware) and (not model or size in model)
    ]
    cells = [
        Cell(name, size, column.method, precision_on(name), column.remat)
        for column in COLUMNS
        for name, size in rows
        if (not method or column.method in method)
        and (inputs is None or (inputs == "host") == (column.remat == "offload"))
    ]
    asker = Asker(lambda cell, context: check_command(cell, context, output), findings)
    done = {}
    with progress("cells", len(cells)) as advance:
        for cell, found in sweep(cells, lambda cell: search(cell, asker), workers):
            done[cell] = found
            advance(len(done), f"{cell}: {contexts_of(found)}")
            write_table(output, table_rows(rows, done))
    plot_contexts(output / "contexts.png", table_rows(rows, done))
    plot_memory(output / "memory.png", table_rows(rows, done))
    table = text_table(table_rows(rows, done))
    Console(width=TABLE_WIDTH).print(table.rich())
    print("\n".join(table.notes))
    print(f"written to {output}: table.md, table.csv, findings.csv, contexts.png and memory.png")


def _known(kind: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(kind, name, known)


def _rows(hardware: tuple[str, ...], model: tuple[str, ...]) -> list[tuple[str, str]]:
    """The rows of the table, and any other pair that was asked for."""
    asked = [(name, size) for name in hardware for size in model]
    return list(dict.fromkeys([*all_rows(), *asked]))


if __name__ == "__main__":
    cli.run(main)
