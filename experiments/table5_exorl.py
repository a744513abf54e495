"""Returns of every method on the ExoRL tasks (Table 5), on the same data, environments and seeds.

    python experiments/table5_exorl.py                                       # the demo on a CPU
    python experiments/table5_exorl.py --tasks cartpole_swingup --methods bc dt at_ring_4 --seeds 3

finds or collects the data, trains and rolls out each cell in a process of its own, and writes the table
beside the paper's to runs/table5-PRESET. Run the same command again after an interruption: finished cells
are kept, a stopped one continues.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import jax
from rich.console import Console

from agentic_ring.data.domains import all_tasks, parse_task
from agentic_ring.data.store import data_root
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import only_writer
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.terminal import cli
from data_prep.stores import prepare_store
from evals.compile.machines import machine
from experiments import paper
from experiments.common.cells import run_cells
from experiments.common.launch import default_preset
from experiments.table5.cells import TableCell, chain_program, in_words, memory_cells, prepare_cell, run_cell
from experiments.table5.methods import method_named
from experiments.table5.presets import TABLE_PRESETS
from experiments.table5.returns_table import (
    RANDOM,
    ReturnsTable,
    plot_returns,
    write_learning_curves,
    write_table,
)

TABLE_WIDTH = 200
"""Characters, even where the terminal is narrower: broken cells are hard to read."""

KNOWN_TASKS = tuple(task for task in paper.exorl_rows() if task in all_tasks())
"""The paper's rows."""


def main(
    preset: Annotated[
        Literal["demo", "small", "paper"] | None, cli.optional_flag(metavar="{demo,small,paper}")
    ] = None,
    tasks: Annotated[tuple[str, ...], cli.optional_flag(metavar="NAME")] = KNOWN_TASKS,
    methods: Annotated[tuple[str, ...], cli.optional_flag(metavar="NAME")] = (),
    seeds: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    data: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    collector: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    workers: int = max(1, (os.cpu_count() or 1) // 2),
    hardware: str = "8xA100",
    cell: Annotated[tuple[str, str, int] | None, cli.optional_flag(metavar="TASK METHOD SEED")] = None,
    fit: Annotated[tuple[str, str] | None, cli.optional_flag(metavar="METHOD MACHINE")] = None,
) -> None:
    """Trains and rolls out every method on every task and prints the table beside the paper's.

    Args:
      preset: Size of the runs: demo (two cores, about four hours), small (one accelerator) or paper (350M
        parameters, 512K tokens). Default: demo on a CPU, small on anything else.
      tasks: Rows of the table. Default: the paper's.
      methods: Columns of the table, such as bc, bc3, bc10, dt, td3, td3_bc, at_ring_4 or at_blockwise_32; or
        fb, fre, told_32 and told_128, which train once for all tasks of a domain, on none of them. Default:
        the preset's.
      seeds: Number of training seeds per cell. Default: the preset's.
      output: Folder of the table and its cells. Default: runs/table5-PRESET.
      data: Folder of the data. Default: $AGENTIC_RING_DATA, or else data.
      collector: ExoRL collector whose data is read, such as rnd. Default: the one found in the data folder;
        if there is none, the script collects data of its own.
      workers: Number of cells at a time; one that trains a ring takes about two cores.
      hardware: Machine for which the 350M model is compiled at each context, such as 8xA100 or TPUv3-512.
      cell: Only compute one prepared cell, given by its task, method and seed; the training on a domain is
        given by the domain, the model (fb, fre or told) and seed.
      fit: Only compile the 350M model, for a method and a machine.
    """
    simulate_cpu_devices()
    if fit is not None:  # before JAX looks for devices: it would look for a driver as well
        jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
        program = chain_program(fit[1], fit[0])
        finding = program.compile_here(output or Path("runs") / "table5")
        print(f"{program}: {in_words(finding)} {finding.message}".rstrip())
        return
    name = preset or default_preset()
    chosen = TABLE_PRESETS[name]
    folder = output or Path("runs") / f"table5-{name}"
    if cell is not None:
        run_cell(TableCell(*cell), folder)
        return
    seeds = chosen.seeds if seeds is None else seeds
    if workers < 1 or seeds < 1:
        raise ConfigError(f"workers is {workers} and seeds {seeds}; both must be at least 1")
    machine(hardware)
    columns = tuple(dict.fromkeys((RANDOM, *(methods or chosen.methods))))
    rows = tuple(dict.fromkeys(tasks))
    domains = dict.fromkeys(parse_task(task).domain for task in rows)
    for method in columns:
        method_named(method)
    if not rows:
        raise ConfigError(f"no task was given; choose some of: {', '.join(KNOWN_TASKS)}")
    root = data or data_root()
    stores = {domain: prepare_store(domain, root, collector) for domain in domains}
    # Seed by seed and task by task, so that an early stop leaves whole rows.
    cells = [TableCell(task, method, seed) for seed in range(seeds) for task in rows for method in columns]
    training = list(dict.fromkeys(each.training for each in cells if each.training is not None))
    with only_writer(folder):
        for each in (*training, *cells):
            prepare_cell(each, chosen, stores[each.domain], folder)
        if training:
            run_cells("training for all tasks of a domain", training, folder, workers)
        run_cells("cells", cells, folder, workers)
        found = {each: results for each in cells if (results := each.results(folder)) is not None}
        table = ReturnsTable(rows, columns, seeds, found)
        for each in write_table(folder, table, memory_cells(hardware, folder), hardware):
            Console(width=TABLE_WIDTH).print(each.rich())
            print("\n".join(each.notes))
        plot_returns(folder / "table.png", table)
        write_learning_curves(folder, table)
        print(f"written to {folder}: table.md, table.csv, table.png, learning_curves.* and cells")


if __name__ == "__main__":
    cli.run(main)
