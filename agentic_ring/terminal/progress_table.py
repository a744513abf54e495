"""The live table of a terminal: a row per stage, with its rate, time left, loss and last return."""

from collections.abc import Iterable
from typing import Any

from agentic_ring.extras import needs_extra

with needs_extra("models"):
    from rich.console import Console
    from rich.progress import (
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column, Table
    from rich.text import Text

FINISHED_ROWS = 12
"""Finished stages that stay in the table; a job of many cells has more of them than a terminal has lines."""


class StageTable(Progress):
    """A live table on standard error; what the program prints meanwhile appears above it."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        stage, note = (Column(name, no_wrap=True, ratio=1) for name in ("stage", ""))
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=stage),
            MofNCompleteColumn(table_column=_right("done")),
            _RateColumn(table_column=_right("rate")),
            TimeRemainingColumn(compact=True, table_column=_right("time left")),
            TextColumn("{task.fields[loss]}", table_column=_right("loss")),
            TextColumn("{task.fields[last_return]}", table_column=_right("last return")),
            TextColumn("{task.fields[note]}", markup=False, table_column=note),
            console=console,
            # Standard output may be a file, and its lines then stay out of the terminal.
            redirect_stdout=Console().is_terminal,
            expand=True,
        )

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """The rows under a header."""
        table = super().make_tasks_table(tasks)
        table.show_header = True
        return table

    def add_stage(self, title: str, total: int, done: int) -> "StageRow":
        """Adds a row for a stage with ``done`` of ``total`` units; drops the oldest of many finished rows."""
        finished = [task.id for task in self.tasks if task.finished]
        for task in finished[: max(0, len(finished) - FINISHED_ROWS)]:
            self.remove_task(task)
        return StageRow(self, title, total, done)


class StageRow:
    """A row of a ``StageTable``."""

    def __init__(self, table: StageTable, title: str, total: int, done: int):
        self._table = table
        self._task = table.add_task(title, total=total, completed=done, loss="", last_return="", note="")

    def update(self, done: int, note: str, loss: float | None, last_return: float | None) -> None:
        """Shows what is known; a figure that is None stays as it was."""
        fields: dict[str, Any] = {"note": note}
        if loss is not None:
            fields["loss"] = f"{loss:.4f}"
        if last_return is not None:
            fields["last_return"] = f"{last_return:.1f}"
        self._table.update(self._task, completed=done, **fields)


class _RateColumn(ProgressColumn):
    """Units per second, or seconds per unit where that is less than one."""

    def render(self, task: Task) -> Text:
        """The rate of the stage's last half minute."""
        speed = task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:,.1f}/s" if speed >= 1 else f"{1 / speed:,.1f} s each")


def _right(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)
