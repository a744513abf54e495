"""Table 3 as text, CSV and Markdown: our maximum contexts beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from agentic_ring.files.atomic import replacing
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import thousands
from evals.compile.llama_step import CHUNK, HEADS_PER_GROUP, Method
from evals.compile.machines import machine
from evals.compile.maximum_context import Cell, Finding, longest
from experiments import paper


@dataclass(frozen=True)
class Column:
    """A method and the memory that holds its layer inputs; see ``Cell``."""

    method: Method
    remat: Literal["full", "offload"]
    title: str


COLUMNS = (
    Column("ring", "full", "ring"),
    Column("ring", "offload", "ring, inputs on host"),
    Column("blockwise", "full", "blockwise"),
    Column("memory_efficient", "full", "memory efficient"),
    Column("vanilla", "full", "vanilla"),
)
TITLES = ["hardware", "model", *(column.title for column in COLUMNS), "over paper", "over best baseline"]
BASELINES = ("blockwise", "memory_efficient", "vanilla")


@dataclass(frozen=True)
class Row:
    """Results of one machine and one model.

    Attributes:
      hardware, model: their names.
      found: findings by column.
      paper: the paper's contexts by method, where it has the row.
    """

    hardware: str
    model: str
    found: Mapping[Column, Sequence[Finding]]
    paper: Mapping[str, int]

    def context(self, column: Column) -> int | None:
        """Returns the longest context that fits, 0 if none does, or None if none was compiled."""
        if column not in self.found:
            return None
        best = longest(list(self.found[column]))
        return best.context if best else 0

    @property
    def ring(self) -> int | None:
        """The longest context of the ring, with inputs on the device or on the host."""
        rings = [self.context(column) for column in COLUMNS if column.method == "ring"]
        return max((context for context in rings if context is not None), default=None)

    def ratio_to_paper(self) -> float | None:
        """Returns our ring's context over the paper's."""
        return self.ring / self.paper["ring"] if self.ring and "ring" in self.paper else None

    def over_best_baseline(self) -> float | None:
        """Returns the ring's context over the best baseline's, all with full recomputation on the device."""
        baselines = [self.context(column) for column in COLUMNS if column.method in BASELINES]
        best = max((context for context in baselines if context), default=None)
        ring = self.context(COLUMNS[0])
        return ring / best if ring and best else None

    def paper_over_best_baseline(self) -> float | None:
        """Returns the same ratio of the paper's figures."""
        if not self.paper:
            return None
        return self.paper["ring"] / max(self.paper[method] for method in BASELINES)


def table_rows(rows: Sequence[tuple[str, str]], done: Mapping[Cell, Sequence[Finding]]) -> list[Row]:
    """Returns the rows with the findings so far."""
    contexts = paper.longest_contexts()
    return [
        Row(
            hardware,
            model,
            {
                column: found
                for column in COLUMNS
                for cell, found in done.items()
                if (cell.hardware, cell.model, cell.method, cell.remat)
                == (hardware, model, column.method, column.remat)
            },
            contexts.get((machine(hardware).paper or "", model), {}),
        )
        for hardware, model in rows
    ]


def contexts_of(found: Sequence[Finding]) -> str:
    """Describes a search, such as "2048K fits, 4096K does not fit"."""
    return ", ".join(
        f"{thousands(finding.context)} {finding.verdict}"
        for finding in sorted(found, key=lambda finding: finding.context)
    )


def write_table(folder: Path, rows: Sequence[Row]) -> None:
    """Writes table.md, table.csv (a line per row) and findings.csv (a line per finding)."""
    with replacing(folder / "table.md") as beside:
        beside.write_text(text_table(rows).markdown())
    write_rows(folder / "table.csv", [_numbers(row) for row in rows])
    write_rows(folder / "findings.csv", [_columns(finding) for finding in _findings(rows)])


def text_table(rows: Sequence[Row]) -> TextTable:
    """Returns the table with the paper's figures in brackets, and notes below it."""
    cells = [dict(zip(TITLES, _cells(row), strict=True)) for row in rows]
    return TextTable("Maximum context, tokens (the paper's)", cells, notes(rows))


def notes(rows: Sequence[Row]) -> list[str]:
    """Returns the notes on the step, the machines and the errors."""
    lines = [
        "Tokens per sequence: the longest power of two whose compiled step fits a device's memory; the "
        "paper's in brackets.",
        "The step: AdamW; parameters, moments and gradients in float32, sharded over all devices; full "
        f"recomputation of layers; logits of {CHUNK} tokens at a time in every method, and so the "
        f"feedforward of blockwise and ring; the ring computes {HEADS_PER_GROUP} heads at a time. One "
        "sequence over all devices for the ring, one per device for the others.",
        "Inputs on host: each layer's input is kept in the host's memory until the backward pass.",
    ]
    for name in dict.fromkeys(row.hardware for row in rows):
        named = machine(name)
        precisions = {finding.cell.precision for finding in _findings(rows) if finding.cell.hardware == name}
        note = f" ({named.note})" if named.note else ""
        lines.append(
            f"{name}: {named.devices} devices {named.hardware.name}{note}, "
            f"{named.hardware.limit / 1e9:.1f} GB of each usable by a program, "
            f"{named.host_memory / 1e9:.0f} GB of host memory per device; {', '.join(sorted(precisions))}."
        )
    errors = [finding for finding in _findings(rows) if finding.verdict == "error"]
    return [*lines, *(f"{e.cell} at {thousands(e.context)}: {e.message}" for e in errors)]


def _findings(rows: Sequence[Row]) -> list[Finding]:
    return [finding for row in rows for found in row.found.values() for finding in found]


def _cells(row: Row) -> list[str]:
    cells = [row.hardware, row.model]
    for column in COLUMNS:
        longest = row.context(column)
        own = "" if longest is None else thousands(longest) if longest else "none"
        if any(finding.verdict == "error" for finding in row.found.get(column, ())):
            own += " (error)"
        published = row.paper.get(column.method) if column.remat == "full" else None
        cells.append(f"{own} ({thousands(published)})" if published else own)
    published = _times(row.paper_over_best_baseline())
    over_best = _times(row.over_best_baseline()) + (f" ({published})" if published else "")
    return [*cells, _times(row.ratio_to_paper()), over_best]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:g}x"


def _numbers(row: Row) -> dict[str, Any]:
    own = {column.title: row.context(column) for column in COLUMNS}
    published = {f"paper {method}": tokens for method, tokens in row.paper.items()}
    return {
        "machine": row.hardware,
        "model": row.model,
        **own,
        **published,
        "ring over paper": row.ratio_to_paper(),
        "ring over best baseline": row.over_best_baseline(),
        "paper's ring over best baseline": row.paper_over_best_baseline(),
    }


def _columns(finding: Finding) -> dict[str, Any]:
    values = asdict(finding)
    cell = values.pop("cell")
    values["compiled at"] = values.pop("commit")
    expected = finding.cell.expected().bytes(finding.context)
    # "hardware" is the column of where it was compiled.
    return {"machine": cell.pop("hardware"), **cell, **values, "expected": round(expected)}
