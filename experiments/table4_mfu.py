"""Model FLOPs utilisation of blockwise and ring attention (Table 4): measured here, projected elsewhere.

    python experiments/table4_mfu.py                                      # this machine's devices
    python experiments/table4_mfu.py --hardware 8xH200 --model 7B --block 65536 --rates rates.csv

Measured: a training step with blockwise attention, one sequence per device, and one with ring attention,
one sequence over all devices, with as many tokens in both: the paper's ratio of contexts. Projected:
the paper's machines, from the rate that the blockwise step reached (here, or in another run: ``--rates``)
or published ones, and the links of the paper's Table 2. The claim under test is that the ring is within a
few per cent of the speed that the blockwise step predicts.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
from rich.console import Console

from agentic_ring.errors import ArgumentError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.run_folder import only_writer
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.provenance import provenance
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from agentic_ring.terminal.tables import TextTable
from evals.compile.llama_step import LlamaStep, Precision, Remat
from evals.compile.machines import machine
from evals.utilisation import kernel_times
from evals.utilisation.measured_mfu import known_peak, measure, simulated, updates
from evals.utilisation.projection import PUBLISHED, read_rates
from experiments.table4.tables import (
    kernel_table,
    measured_table,
    minimum_table,
    project_machine,
    project_paper,
    projected_table,
)

CORES = max(2, os.cpu_count() or 2)
"""Simulated devices of a CPU, one per core: devices that share a core would wait for each other."""

BLOCK_ON_CPU, BLOCK = 4096, 32768
"""Tokens per device."""

SIMULATED = (
    "The devices are simulated and share their cores: blockwise attention has one sequence per device, the "
    "ring one as long as all of them, so both steps use the same cores and expected times follow from "
    "operations. A transfer is a copy, and nothing overlaps it."
)


def main(
    model: Annotated[str | None, cli.optional_flag(metavar="SIZE")] = None,
    block: Annotated[int | None, cli.optional_flag(metavar="TOKENS")] = None,
    precision: Annotated[Precision | None, cli.optional_flag(metavar="{float32,bfloat16}")] = None,
    remat: Remat = "full",
    hardware: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    rates: Annotated[Path | None, cli.optional_flag(metavar="CSV")] = None,
    turns: int = 3,
    simulated_devices: Annotated[int, cli.optional_flag(metavar="N")] = CORES,
    trace: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    output: Path = Path("runs/table4_mfu"),
) -> None:
    """Measures utilisation on this machine's devices and projects it for other machines.

    Args:
      model: Model size: tiny, 100M, 350M, 1B, 3B, 7B, 8B, 13B, 30B or 65B. Default: tiny on a CPU, else 7B.
      block: Tokens per device: the blockwise context, and the ring's over the number of devices. Default:
        4096 on a CPU, 32768 on anything else.
      precision: Type of matrix products and activations. Default: float32 on a CPU, bfloat16 on anything
        else.
      remat: What the backward pass computes again: full recomputes each layer, as in the paper; offload also
        keeps the layer's input in host memory; attention keeps the output of attention.
      hardware: Project this machine (8xH200, TPUv5p-256, ...) with --model and --block; no training step
        runs. Default: measure here, and project the paper's machines.
      rates: File rates.csv of another run to project from. Default: the rate that the blockwise step reaches
        here; on a CPU, and with --hardware, rates published for an H100.
      turns: Number of timed rounds; medians are reported with minimum and maximum.
      simulated_devices: Number of devices where there is only a CPU. Default: one per core, at least 2.
      trace: Folder for a profile of one step of each method, whose longest kernels are then listed. Has no
        effect with --hardware, where no step runs.
      output: Folder for CSV files and table4.md.
    """
    if hardware is not None:
        machine(hardware)
    chosen = None if rates is None else (read_rates(rates), str(rates))
    if simulated_devices < 1:
        raise ArgumentError(f"simulated_devices is {simulated_devices}; it must be at least 1")
    simulate_cpu_devices(simulated_devices)
    on_cpu = simulated()
    model = model or ("tiny" if on_cpu else "7B")
    if block is None:
        block = BLOCK_ON_CPU if on_cpu else BLOCK
    if block < 2 or block % 2:
        raise ArgumentError(f"block is {block}; take an even number of tokens per device, at least 2")
    precision, devices = precision or ("float32" if on_cpu else "bfloat16"), jax.devices()
    blockwise = LlamaStep(model, "blockwise", block, tuple(devices), precision, remat=remat)
    ring = replace(blockwise, method="ring", context=block * len(devices))
    steps = [blockwise, ring] if len(devices) > 1 else [blockwise]
    with only_writer(output):
        tables: list[TextTable] = []
        if hardware is None:
            measured, reached = measure(steps, turns)
            write_rows(output / "rates.csv", [vars(reached)])
            write_rows(output / "measured.csv", measured)
            notes = [f"Utilisation is a share of {known_peak(jnp.dtype(precision).itemsize)[1]}."]
            notes += [SIMULATED] if on_cpu and len(steps) > 1 else []
            tables.append(measured_table(measured, f"{model} in {precision} on {where()}", notes))
            # The share of the peak that a CPU reaches says little about accelerators.
            if chosen is None and not on_cpu:
                chosen = reached, f"of {model} at {block} tokens, measured on {where()}"
        base, source = chosen or (PUBLISHED, "published for an H100, see evals/utilisation/projection.py")
        if hardware is None:
            projected = project_paper(base, remat)
        else:
            projected = project_machine(hardware, model, block, base, remat)
        write_rows(output / "projected.csv", projected)
        tables += [projected_table(projected, source), minimum_table()]
        if trace is not None and hardware is None:
            tables += [traced(step, trace) for step in steps]
        publish(tables, output)


def where() -> str:
    """Describes the devices."""
    found = provenance()["hardware"]
    simulated = f", simulated on {found['cores']} cores of {found['cpu']}" if found["simulated"] else ""
    return f"{found['devices']} x {found['device_kind']}{simulated}"


def traced(step: LlamaStep, directory: Path) -> TextTable:
    """Saves a profile of one update and returns a table of its longest kernels."""
    update = updates(step)
    jax.block_until_ready(update())
    return kernel_table(step.method, kernel_times.trace(directory / step.method, update))


def publish(tables: Sequence[TextTable], output: Path) -> None:
    """Prints the tables and writes them to ``table4.md``, with the command."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in tables:
        console.print(table.rich())
        for note in table.notes:
            console.print(note, style="dim", highlight=False)
    origin = provenance()
    heading = f"# Table 4\n\n`{origin['command']}` at commit {origin['commit']}, on {where()}.\n"
    with replacing(output / "table4.md") as beside:
        beside.write_text("\n".join([heading, *(table.markdown() for table in tables)]))
    console.print(f"written to {output}: table4.md and CSV files")


if __name__ == "__main__":
    cli.run(main)
