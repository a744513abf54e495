"""Time of attention to rows of packed documents: by layout on a ring, and against what is live in them.

    python evals/packed_speed.py --tokens 32768 --documents 2048 8192

Causal, batch 1, forward and backward. Documents have log-normal lengths (sigma 1) about a median; the first
row of each ring is one document as long as the sequence. The live share is that of the pairs of a causal
sequence that lie in one document. On a CPU each device computes with one thread, as cores that simulate more
devices than there are would hide the imbalance. All rows are timed interleaved.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agentic_ring.attention import Layout, MaskSpec, attention, order
from agentic_ring.attention.ring.balance import imbalance, tile_counts
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from evals.speed.attention_benchmark import Problem
from evals.speed.interleaved import Spread, time_interleaved

LAYOUTS: tuple[Layout, ...] = ("zigzag", "block_striped")
ONE_DEVICE: tuple[Layout, ...] = ("contiguous",)

Case = tuple[int | None, Layout]
"""Median length of the documents, None for one document, and the layout."""


@dataclass(frozen=True)
class PackedRow:
    """One kind of packing, ring and layout.

    Attributes:
      documents: median tokens of a document; None is one document.
      live: live share of the causal pairs.
      devices: size of the ring.
      layout: order of the sequence over the ring; "contiguous" on one device.
      critical_path: tiles of the slowest devices, over the ideal; see ``imbalance``.
      seconds: time of forward and backward.
      to_zigzag: this time over that in zigzag order in the same round; None without a ring.
      to_one_document: this time over that of one document in the same layout and round.
    """

    tokens: int
    documents: int | None
    live: float
    devices: int
    layout: Layout
    critical_path: float
    seconds: Spread
    to_zigzag: Spread | None
    to_one_document: Spread

    def columns(self) -> dict[str, Any]:
        """The row as one level of named cells, for a CSV file."""
        cells: dict[str, Any] = {}
        for name, value in vars(self).items():
            cells |= value.cells(name) if isinstance(value, Spread) else {name: value}
        return cells


def packed_row(tokens: int, median: int | None) -> np.ndarray:
    """Segment ids [1, tokens] of documents of log-normal lengths about ``median``; None is one document."""
    if median is None:
        return np.zeros((1, tokens), np.int32)
    lengths = np.random.default_rng(median).lognormal(np.log(median), 1.0, size=10 + 10 * tokens // median)
    return np.repeat(np.arange(len(lengths)), lengths.astype(int) + 1)[None, :tokens].astype(np.int32)


def live_share(segment_ids: np.ndarray) -> float:
    """Share of the causal pairs of a row [1, T] whose tokens lie in one document."""
    lengths = np.bincount(segment_ids[0])
    return float((lengths * (lengths + 1)).sum() / (len(segment_ids[0]) * (len(segment_ids[0]) + 1)))


def packed_speed(problem: Problem, medians: tuple[int, ...], devices: int, turns: int) -> list[PackedRow]:
    """Times rows of each kind of packing in each layout; see the module."""
    tokens = problem.tokens
    layouts = LAYOUTS if devices > 1 else ONE_DEVICE
    mesh = make_mesh(MeshShape(ring=devices), jax.devices()[:devices])
    sharding = jax.NamedSharding(mesh, jax.P(None, "ring"))
    arrays = problem.arrays(sharding)
    cases: list[Case] = [(median, layout) for median in (None, *medians) for layout in layouts]

    def differentiate(
        layout: Layout, segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array
    ) -> tuple[jax.Array, ...]:
        attend = partial(attention, segment_ids=segments, mesh=mesh, layout=layout, permuted=devices > 1)
        return jax.vjp(attend, q, k, v)[1](d_output)

    functions = []
    for median, layout in cases:
        places = order(layout, tokens, devices)
        segments = jax.device_put(packed_row(tokens, median)[:, places], sharding)
        functions.append(partial(jax.jit(partial(differentiate, layout)), segments, *arrays))
    seconds = dict(zip(cases, time_interleaved(turns, *functions), strict=True))

    def over(case: Case, other: Case) -> Spread:
        return Spread.of(x / y for x, y in zip(seconds[case], seconds[other], strict=True))

    rows = []
    for median, layout in cases:
        segments = packed_row(tokens, median)
        rows.append(
            PackedRow(
                tokens,
                median,
                live_share(segments),
                devices,
                layout,
                imbalance(tile_counts(layout, devices, tokens, MaskSpec(), segments)),
                Spread.of(seconds[median, layout]),
                over((median, layout), (median, "zigzag")) if devices > 1 else None,
                over((median, layout), (None, layout)),
            )
        )
    return rows


def main(
    tokens: int = 16_384,
    documents: tuple[int, ...] = (512, 2048, 8192),
    rings: tuple[int, ...] = (1, 2),
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    turns: int = 5,
    rows_to: Path | None = None,
) -> None:
    """Times attention to packed rows and prints it beside the share of pairs that are live.

    Args:
      tokens: Length of a row.
      documents: Median lengths of documents; one part of the table each, after that of one document.
      rings: Sizes of the ring; simulated where there is only a CPU.
      heads: Number of query heads.
      kv_heads: Number of key and value heads.
      head_dim: Size of a head.
      turns: Timed rounds; medians are reported with minimum and maximum.
      rows_to: CSV file for the rows; none is written if left out.
    """
    one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {one_thread}"
    simulate_cpu_devices(max(rings))
    problem = Problem(tokens, heads, kv_heads, head_dim)
    rows = [row for ring in rings for row in packed_speed(problem, documents, ring, turns)]
    title = f"packed rows of {tokens:,} tokens, forward and backward, {heads} heads of {head_dim}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("documents", "live", "ring", "layout", "critical path", "seconds", "/ zigzag", "/ one"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            "one" if row.documents is None else f"{row.documents:,}",
            f"{row.live:.1%}",
            str(row.devices),
            row.layout,
            f"{row.critical_path:.2f}",
            *(_cell(spread) for spread in (row.seconds, row.to_zigzag, row.to_one_document)),
        )
    Console(width=160).print(table)
    if rows_to is not None:
        write_rows(rows_to, [row.columns() for row in rows])


def _cell(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


if __name__ == "__main__":
    cli.run(main)
