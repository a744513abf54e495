"""Time of one decode step with a long cache, relative to the time of reading the cache once.

    python evals/decode_speed.py --cached 524288

A step computes little and reads every key and value, so memory bandwidth limits its speed. The bandwidth
is measured in the same process, interleaved with the step, by summing a float32 array of as many bytes as
the cache has. The ratio is of the two medians: another program that slows one down slows both.
"""

from dataclasses import asdict
from pathlib import Path

import rich
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring.attention.cache.storage import CACHE_DTYPES, CacheDtype
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from evals.speed.decode_step import decode_speed


def main(
    cached: int = 524_288,
    dtypes: tuple[CacheDtype, ...] = CACHE_DTYPES,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    repeats: int = 15,
    devices: int = 1,
    rows_to: Path | None = None,
) -> None:
    """Times a decode step and prints its ratio to reading the cache once.

    Args:
      cached: Number of tokens in the cache.
      dtypes: Types of the cache; one row of the table each.
      heads: Number of query heads.
      kv_heads: Number of key and value heads.
      head_dim: Size of a head.
      repeats: Number of timed steps; medians are reported.
      devices: Number of devices of the ring; simulated where there is only a CPU.
      rows_to: CSV file for the rows; none is written if left out.
    """
    simulate_cpu_devices(devices)
    rows = [decode_speed(cached, dtype, heads, kv_heads, head_dim, repeats, devices) for dtype in dtypes]
    table = Table(
        title=f"decoding one token with {cached:,} in the cache", title_justify="left", box=SIMPLE_HEAD
    )
    for column in ("cache", "ring", "MB", "memory GB/s", "step ms", "step / read"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (row.cache_bytes / 1e6, row.bandwidth / 1e9, row.step_seconds * 1e3)
        table.add_row(row.dtype, str(row.ring), *(f"{x:,.1f}" for x in figures), f"{row.ratio:.2f}")
    rich.print(table)
    if rows_to is not None:
        write_rows(rows_to, [asdict(row) for row in rows])


if __name__ == "__main__":
    cli.run(main)
