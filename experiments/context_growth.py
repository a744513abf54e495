"""Growth of the maximum context with the number of devices: one model on a ring of 1, 2, 4, ... GPUs.

python experiments/context_growth.py
"""

import os
from pathlib import Path

import jax
import rich
from matplotlib.figure import Figure as Canvas
from rich.table import Table

from agentic_ring.errors import ConfigError
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import progress
from evals.common.plots import BLUE, GREY, save
from evals.compile.machines import machine
from evals.compile.maximum_context import Cell, longest, search_finely, sweep
from experiments.table3_max_context import cell_compiler


def plot_growth(path: Path, title: str, contexts: dict[int, int]) -> None:
    """Plots contexts by number of devices, and a line in proportion to the first, on log-log axes."""
    canvas = Canvas(figsize=(6.4, 4.4), layout="constrained")
    axes = canvas.subplots()
    devices = sorted(contexts)
    first = contexts[devices[0]] / devices[0]
    axes.plot(devices, [first * n for n in devices], color=GREY, linestyle="--", label="in proportion")
    axes.plot(devices, [contexts[n] for n in devices], "o", color=BLUE, label="maximum that compiles")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(devices, [str(n) for n in devices])
    ticks = [contexts[n] for n in devices]
    axes.set_yticks(ticks, [f"{tick / 1024**2:.1f}M" for tick in ticks])
    axes.set_xlabel("devices of the ring")
    axes.set_ylabel("tokens per sequence")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(canvas, path)


def main(
    model: str = "350M",
    gpu: str = "A100",
    most_devices: int = 256,
    output: Path = Path("runs/context_growth"),
    workers: int = max(1, (os.cpu_count() or 1) // 2),
) -> None:
    """Finds the maximum context on 1, 2, 4, ... devices, to within 1024 tokens per device, and plots it.

    Args:
      model: Size of a model that fits one device.
      gpu: Kind of GPU: A100, H100 or H200.
      most_devices: Largest number of devices.
      output: Folder of the findings, which a later run reads, and of growth.csv and growth.png.
      workers: Programs compiled at a time; each takes a few GB and about one core.
    """
    jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    counts = [2**n for n in range(most_devices.bit_length())]
    cells = [Cell(f"{count}x{gpu}", model, "ring", "bfloat16") for count in counts]
    for cell in cells:
        machine(cell.hardware)
    compile_at = cell_compiler(output)
    contexts: dict[int, int] = {}
    with progress("numbers of devices", len(cells)) as advance:
        for cell, found in sweep(cells, lambda cell: search_finely(cell, compile_at), workers):
            best = longest(found)
            if best is None:
                messages = "; ".join(dict.fromkeys(finding.message for finding in found))
                raise ConfigError(f"no context of {cell} fits: {messages}")
            contexts[cell.machine.devices] = best.context
            advance(len(contexts), f"{cell}: {best.context:,} tokens")
    first = contexts[1]
    table = Table("devices", "tokens", "tokens/device", "off proportion")
    rows = []
    for count, context in sorted(contexts.items()):
        off = context / (count * first) - 1
        table.add_row(str(count), f"{context:,}", f"{context // count:,}", f"{100 * off:+.1f}%")
        rows.append({"model": model, "gpu": gpu, "devices": count, "tokens": context, "off": round(off, 4)})
    write_rows(output / "growth.csv", rows)
    plot_growth(output / "growth.png", f"{model} on {gpu}s: context against devices", contexts)
    rich.print(table)


if __name__ == "__main__":
    cli.run(main)
