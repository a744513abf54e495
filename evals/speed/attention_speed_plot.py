"""Plot of the time and memory of attention against sequence length.

``plot_speed(Path("attention.png"), read_rows(Path("attention.csv")))`` draws rows that were written before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from agentic_ring.errors import ArgumentError
from evals.common.plots import BLUE, GREEN, GREY, ORANGE, PINK, save
from evals.speed.attention_benchmark import DIRECTIONS, Direction

STYLES = {
    "ours ring": (BLUE, "o"),
    "ours all_gather": (GREEN, "s"),
    "ours ulysses": (PINK, "v"),
    "ours ulysses_ring": (PINK, "^"),
    "ours local": (GREY, "D"),
    "jax.nn": ("black", "x"),
    "ringattention": (ORANGE, "P"),
}
"""Colour and marker of each implementation."""


def plot_speed(
    path: Path, rows: Sequence[Mapping[str, Any]], direction: Direction = "forward+backward"
) -> None:
    """Draws two log-log panels: seconds per call with their spread, and temporary memory per device.

    Args:
      path: PNG file to write.
      rows: cells of ``SpeedRow.columns``, as numbers or as text.
      direction: the rows to draw.

    Raises:
      ArgumentError: no rows of this direction.
    """
    rows = sorted((row for row in rows if row["direction"] == direction), key=lambda row: int(row["tokens"]))
    if not rows:
        raise ArgumentError(f"no rows of {direction}; nothing to draw (directions: {', '.join(DIRECTIONS)})")
    # Without pyplot: no global state, no display, nothing to close.
    canvas = Canvas(figsize=(10, 4.8), layout="constrained")
    time, memory = canvas.subplots(1, 2)
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == name]
        colour, marker = STYLES.get(name, (GREY, "."))
        devices = max(int(row["devices"]) for row in own)
        style = {"color": colour, "marker": marker, "linewidth": 1.8, "markersize": 6}
        tokens = [int(row["tokens"]) for row in own]
        seconds, low, high = (
            [float(row[cell]) for row in own] for cell in ("seconds", "seconds_low", "seconds_high")
        )
        time.plot(tokens, seconds, label=f"{name} ({devices} device{'s'[: devices > 1]})", **style)
        time.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0)
        memory.plot(tokens, [int(row["temp_bytes"]) / 2**20 for row in own], **style)
    _finish(time, rows, f"time of {direction}", "seconds (median; shaded: least to greatest)")
    _finish(memory, rows, f"memory of {direction}", "temporary MiB per device (planned)")
    canvas.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(canvas, path)


def _finish(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({int(row["tokens"]) for row in rows}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens")
    axes.set_ylabel(label)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
