"""Table 3 as text, CSV and Markdown: our maximum contexts beside the paper's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentic_ring.files.atomic import replacing
from agentic_ring.results.results_file import write_rows
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import thousands
from evals.compile.llama_step import CHUNK, HEADS_PER_GROUP, Method
from evals.compile.machines import machine
from evals.compile.maximum_context import ContextCell, Finding, longest
from experiments import paper


class Column(NamedTuple):
    """A method and the memory that holds its layer inputs; see ``ContextCell``."""

    method: Method
    remat: Literal["full", "offload"]
    title: str


RING = Column("ring", "full", "ring")
RING_HOST = Column("ring", "offload", "ring, inputs on host")
BASELINES = (
    Column("blockwise", "full", "blockwise"),
    Column("memory_efficient", "full", "memory efficient"),
    Column("vanilla", "full", "vanilla"),
)
COLUMNS = (RING, RING_HOST, *BASELINES)
Found = Mapping[ContextCell, Sequence[Finding]]


@dataclass(frozen=True)
class Row:
    """Results of one machine and one model.

    Attributes:
      hardware, model: their names.
      found: findings by column, with their cell.
    """

    hardware: str
    model: str
    found: Mapping[Column, tuple[ContextCell, Sequence[Finding]]]

    @property
    def paper(self) -> Mapping[str, int]:
        """The paper's contexts by method, where it has the row."""
        return paper.longest_contexts().get((machine(self.hardware).paper or "", self.model), {})

    def findings(self) -> Iterator[tuple[ContextCell, Finding]]:
        """Yields every finding with its cell."""
        return ((cell, finding) for cell, findings in self.found.values() for finding in findings)

    def context(self, column: Column) -> int | None:
        """Returns the longest context that fits, 0 if none does, or None if none was compiled."""
        if column not in self.found:
            return None
        best = longest(self.found[column][1])
        return best.context if best else 0

    def ratio_to_paper(self) -> float | None:
        """Returns the ring's context, with inputs on the device or the host, over the paper's."""
        ring = max(self.context(RING) or 0, self.context(RING_HOST) or 0)
        return ring / self.paper["ring"] if ring and self.paper else None

    def over_best_baseline(self) -> float | None:
        """Returns the ring's context over the best baseline's, all with full recomputation on the device."""
        ring, best = self.context(RING), max(self.context(column) or 0 for column in BASELINES)
        return ring / best if ring and best else None

    def paper_over_best_baseline(self) -> float | None:
        """Returns the same ratio of the paper's figures."""
        published = self.paper
        return published["ring"] / max(published[c.method] for c in BASELINES) if published else None


def table_rows(rows: Sequence[tuple[str, str]], done: Found) -> list[Row]:
    """Returns the rows with the findings so far."""

    def row(hardware: str, model: str) -> Row:
        own = [cell for cell in done if (cell.hardware, cell.model) == (hardware, model)]
        kinds = {(cell.method, cell.remat): cell for cell in own}
        cells = {column: kinds.get((column.method, column.remat)) for column in COLUMNS}
        return Row(hardware, model, {column: (cell, done[cell]) for column, cell in cells.items() if cell})

    return [row(*names) for names in rows]


def write_table(folder: Path, rows: Sequence[Row]) -> None:
    """Writes table.md, table.csv (a line per row) and findings.csv (a line per finding)."""
    with replacing(folder / "table.md") as beside:
        beside.write_text(text_table(rows).markdown())
    write_rows(folder / "table.csv", [_numbers(row) for row in rows])
    write_rows(folder / "findings.csv", [_columns(*found) for row in rows for found in row.findings()])


def text_table(rows: Sequence[Row]) -> TextTable:
    """Returns the table with the paper's figures in brackets, and notes on step, machines and errors."""
    notes = [
        "Tokens per sequence: the longest power of two whose compiled step fits a device's memory; the "
        "paper's in brackets.",
        "The step: AdamW; parameters, moments and gradients in float32, sharded over all devices; full "
        f"recomputation of layers; logits of {CHUNK} tokens at a time in every method, and so the "
        f"feedforward of blockwise and ring; the ring computes {HEADS_PER_GROUP} heads at a time. One "
        "sequence over all devices for the ring, one per device for the others.",
        "Inputs on host: each layer's input is kept in the host's memory until the backward pass.",
    ]
    found = [each for row in rows for each in row.findings()]
    for name in dict.fromkeys(row.hardware for row in rows):
        named = machine(name)
        precisions = sorted({cell.precision for cell, _ in found if cell.hardware == name})
        note = f" ({named.note})" if named.note else ""
        notes.append(
            f"{name}: {named.devices} devices {named.hardware.name}{note}, "
            f"{named.hardware.limit / 1e9:.1f} GB of each usable by a program, "
            f"{named.host_memory / 1e9:.0f} GB of host memory per device; {', '.join(precisions)}."
        )
    notes += [
        f"{cell} at {thousands(finding.context)}: {finding.message}"
        for cell, finding in found
        if finding.verdict == "error"
    ]
    return TextTable("Maximum context, tokens (the paper's)", [_cells(row) for row in rows], notes)


def _cells(row: Row) -> dict[str, str]:
    cells = {"hardware": row.hardware, "model": row.model}
    for column in COLUMNS:
        best = row.context(column)
        own = "" if best is None else thousands(best) if best else "none"
        if column in row.found and any(f.verdict == "error" for f in row.found[column][1]):
            own += " (error)"
        published = row.paper.get(column.method) if column.remat == "full" else None
        cells[column.title] = f"{own} ({thousands(published)})" if published else own
    cells["over paper"] = _times(row.ratio_to_paper())
    published = _times(row.paper_over_best_baseline())
    cells["over best baseline"] = _times(row.over_best_baseline()) + (f" ({published})" if published else "")
    return cells


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:g}x"


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "machine": row.hardware,
        "model": row.model,
        **{column.title: row.context(column) for column in COLUMNS},
        **{f"paper {method}": tokens for method, tokens in row.paper.items()},
        "ring over paper": row.ratio_to_paper(),
        "ring over best baseline": row.over_best_baseline(),
        "paper's ring over best baseline": row.paper_over_best_baseline(),
    }


def _columns(cell: ContextCell, finding: Finding) -> dict[str, Any]:
    names, values = asdict(cell), asdict(finding)
    values["compiled at"] = values.pop("commit")
    # "hardware" is the column of where it was compiled.
    expected = round(cell.expected.bytes(finding.context))
    return {"machine": names.pop("hardware"), **names, **values, "expected": expected}
