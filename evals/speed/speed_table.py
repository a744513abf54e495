"""Table of the rows of an attention benchmark."""

import statistics
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evals.speed.attention_benchmark import SpeedRow


def print_rows(title: str, rows: Sequence[SpeedRow], left_out: Sequence[str]) -> None:
    """Prints the rows of one problem as a table, and below it the implementations that were left out."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    references = list(dict.fromkeys(name for row in rows for name in row.ratios))
    figures = ("seconds", "min to max", "of matmul", "temp MB/device")
    for column in ("implementation", "direction"):
        table.add_column(column)
    for column in (*figures, *(f"time / {name}" for name in references)):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.contender,
            row.direction,
            f"{row.seconds.median:.4g}",
            f"{row.seconds.low:.4g} to {row.seconds.high:.4g}",
            f"{row.share_of_matmul.median:.0%}",
            f"{row.temp_bytes / 1e6:,.1f}",
            *(f"{row.ratios[name].median:.2f}" if name in row.ratios else "" for name in references),
        )
    console = Console(width=160)
    console.print(table)
    if rows:
        rate = statistics.median(row.matmul_rate for row in rows)
        console.print(f"matrix product: {rate / 1e9:,.0f} GFLOP/s (median)")
    for line in left_out:
        console.print(f"left out: {line}")
