"""A table with named columns, for the terminal and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentic_ring.extras import needs_extra

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class TextTable:
    """Rows with the same columns."""

    title: str
    rows: Sequence[Mapping[str, str]]
    """Cells by column, in the same order in each row."""
    notes: Sequence[str] = ()
    """Lines below the table."""

    @property
    def _columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    def rich(self) -> "Table":
        """The table for ``rich``'s console. Measuring attention needs JAX alone, and Markdown no ``rich``."""
        with needs_extra("models"):
            from rich.box import SIMPLE_HEAD
            from rich.table import Table

        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(self._columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*row.values())
        return table

    def markdown(self) -> str:
        """The table as Markdown, with its title as a heading and its notes below."""
        columns = self._columns
        lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *(list(row.values()) for row in self.rows)]
        body = [f"| {' | '.join(line)} |" for line in lines if line]
        return "\n".join([f"## {self.title}", "", *body, "", *(f"* {note}" for note in self.notes), ""])
