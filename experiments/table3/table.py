"""Table 3 as text, CSV, Markdown and plots: our maximum contexts beside the paper's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from agentic_ring.files.atomic import replacing
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import thousands
from evals.compile.llama_step import CHUNK, HEADS_PER_GROUP, Method
from evals.compile.machines import machine
from evals.compile.maximum_context import ContextCell, Finding, longest
from evals.plots import BLUE, GREEN, GREY, ORANGE, PINK, save
from experiments import paper


class Column(NamedTuple):
    """A method and the memory that holds its layer inputs; its colour and marker in plots."""

    method: Method
    remat: Literal["full", "offload"]
    title: str
    colour: str
    marker: str


RING = Column("ring", "full", "ring", BLUE, "o")
RING_HOST = Column("ring", "offload", "ring, inputs on host", GREEN, "s")
BASELINES = (
    Column("blockwise", "full", "blockwise", ORANGE, "v"),
    Column("memory_efficient", "full", "memory efficient", PINK, "^"),
    Column("vanilla", "full", "vanilla", GREY, "D"),
)
COLUMNS = (RING, RING_HOST, *BASELINES)
PANELS_ACROSS = 4


@dataclass(frozen=True)
class Row:
    """Findings of one machine and one model, by column and with their cell."""

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
        return longest(self.found[column][1]) if column in self.found else None

    def ratios(self) -> tuple[float | None, float | None, float | None]:
        """Returns the ring's context over the paper's, over our best baseline's, and the paper's own ratio.

        The first is with layer inputs on the device or the host; the others are with all on the device.
        """
        published, ring = self.paper, self.context(RING) or 0
        own, best = (max(self.context(c) or 0 for c in columns) for columns in ((RING, RING_HOST), BASELINES))
        return (
            own / published["ring"] if own and published else None,
            ring / best if ring and best else None,
            published["ring"] / max(published[c.method] for c in BASELINES) if published else None,
        )


def table_rows(names: Sequence[tuple[str, str]], done: Mapping[ContextCell, Sequence[Finding]]) -> list[Row]:
    """Returns the rows of these machines and models, with the findings so far."""
    cells = {(cell.hardware, cell.model, cell.method, cell.remat): cell for cell in done}
    rows = []
    for name in names:
        own = {column: cells.get((*name, column.method, column.remat)) for column in COLUMNS}
        rows.append(Row(*name, {column: (cell, done[cell]) for column, cell in own.items() if cell}))
    return rows


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
    over, best, published = ("" if ratio is None else f"{ratio:g}x" for ratio in row.ratios())
    cells["over paper"] = over
    cells["over best baseline"] = best + (f" ({published})" if published else "")
    return cells


def _numbers(row: Row) -> dict[str, Any]:
    names = ("ring over paper", "ring over best baseline", "paper's ring over best baseline")
    return {
        "machine": row.hardware,
        "model": row.model,
        **{column.title: row.context(column) for column in COLUMNS},
        **{f"paper {method}": tokens for method, tokens in row.paper.items()},
        **dict(zip(names, row.ratios(), strict=True)),
    }


def _columns(cell: ContextCell, finding: Finding) -> dict[str, Any]:
    names, values = asdict(cell), asdict(finding)
    values["compiled at"] = values.pop("commit")
    # "hardware" is the column of where it was compiled.
    expected = round(cell.expected_bytes(finding.context))
    return {"machine": names.pop("hardware"), **names, **values, "expected": expected}


def plot_contexts(path: Path, rows: Sequence[Row]) -> None:
    """Plots one line per row of the table: a marker for each method, hollow where it is the paper's."""
    canvas = Canvas(figsize=(9, 1.6 + 0.36 * len(rows)), layout="constrained")
    axes = canvas.subplots()
    for place, row in enumerate(rows):
        axes.axhline(place, color="0.92", linewidth=0.8, zorder=0)
        for column in COLUMNS:
            own, published = row.context(column), row.paper.get(column.method)
            marker, colour = column.marker, column.colour
            if own:
                axes.plot(own, place, marker, color=colour, markersize=7, label=column.title)
            if published and column.remat == "full":
                axes.plot(published, place - 0.22, marker, color=colour, markersize=5, mfc="none")
    axes.set_yticks(range(len(rows)), [f"{row.hardware}  {row.model}" for row in rows])
    axes.invert_yaxis()
    _tokens(axes)
    title = "maximum context that compiles (small and hollow: the paper's)"
    axes.set_title(title, loc="left", fontweight="bold")
    _legend(canvas)
    save(canvas, path)


def plot_memory(path: Path, rows: Sequence[Row]) -> None:
    """Plots one panel per row: compiled bytes per device at each context, the formula, and the limit."""
    down = -(-len(rows) // PANELS_ACROSS)
    canvas = Canvas(figsize=(14, 2.9 * down), layout="constrained")
    panels = list(canvas.subplots(down, PANELS_ACROSS, squeeze=False).flat)
    for axes, row in zip(panels, rows, strict=False):
        for column, (cell, findings) in row.found.items():
            colour, marker = column.colour, column.marker
            axes.axhline(findings[0].limit / 1e9, color="black", linewidth=1, linestyle=":")
            known = [(f.context, f.needed / 1e9, f.verdict) for f in findings if f.needed is not None]
            for context, needed, verdict in sorted(known):
                face = colour if verdict == "fits" else "none"
                axes.plot(context, needed, marker, color=colour, mfc=face, label=column.title)
            if known:
                first, last = min(known)[0] // 4, max(known)[0]
                contexts = [first * 2**n for n in range((last // first).bit_length())]
                expected = [cell.expected_bytes(context) / 1e9 for context in contexts]
                axes.plot(contexts, expected, color=colour, linewidth=1, alpha=0.6)
        _tokens(axes)
        axes.set_title(f"{row.hardware}, {row.model}", loc="left", fontsize=9, fontweight="bold")
        axes.set_ylabel("GB per device", fontsize=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    _legend(canvas)
    canvas.suptitle(
        "filled: fits; hollow: does not (TPUs: a lower bound); lines: the formula; dotted: the limit"
    )
    save(canvas, path)


def _legend(canvas: Canvas) -> None:
    """Draws a legend with one entry per name, which several panels may share: the first, which is filled."""
    named = {}
    for axes in canvas.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    canvas.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False)


def _tokens(axes: Axes) -> None:
    def short(tokens: float, _: int) -> str:
        return f"{tokens / 2**20:g}M" if tokens >= 2**20 else thousands(int(tokens))

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=8))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.set_xlabel("tokens per sequence", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
