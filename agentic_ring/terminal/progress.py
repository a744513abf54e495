"""Progress of long jobs: one live table on a terminal, occasional lines elsewhere."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax

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

LOG_INTERVAL_SECONDS = 15.0
FINISHED_ROWS = 12
"""Finished stages that stay in the table; a job of many cells has more of them than a terminal has lines."""

_open_tables: "list[_StageTable]" = []
"""The table that is live, if any: a terminal has room for one."""


class Advance(Protocol):
    """Reports the progress of a job."""

    def __call__(
        self, done: int, note: str = "", *, loss: float | None = None, last_return: float | None = None
    ) -> None:
        """Reports that ``done`` units are finished, with the loss of the last update.

        ``last_return`` is that of the last episode or trial, a mean where there were several.
        """
        ...


@contextmanager
def live_table() -> Iterator[None]:
    """Shows all progress within the block in one live table, if standard error is a terminal.

    Where CI or NO_COLOR is set or TERM is dumb, the user has asked for plain text.
    """
    plain = (
        os.environ.get("CI") or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    )
    if _open_tables or plain or jax.process_index() != 0 or not sys.stderr.isatty():
        yield
        return
    with _StageTable() as table:
        _open_tables.append(table)
        try:
            yield
        finally:
            _open_tables.clear()


@contextmanager
def progress(title: str, total: int, finished: int = 0) -> Iterator[Advance]:
    """Shows the progress of a job of ``total`` units, on process 0 only.

    It is a row of the live table on a terminal, and a line every 15 s elsewhere. ``finished`` units were done
    before, by a run that this one continues.

    Example:
      with progress("training", steps) as advance:
          for step in range(steps):
              advance(step + 1, loss=loss)
    """
    with live_table():
        stage = _open_tables[0].add_stage if _open_tables else _line_logger
        yield stage(title, total, finished)


def say(message: str) -> None:
    """Prints one line for the user on standard error, on process 0 only."""
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)


def _line_logger(title: str, total: int, finished: int) -> Advance:
    started = last_line = time.monotonic()

    def advance(
        done: int, note: str = "", *, loss: float | None = None, last_return: float | None = None
    ) -> None:
        nonlocal last_line
        now = time.monotonic()
        if done < total and now - last_line < LOG_INTERVAL_SECONDS:
            return
        last_line = now
        left = (now - started) / (done - finished) * (total - done) if done > finished else float("nan")
        details = [f"loss {loss:.4f}"] if loss is not None else []
        details += [f"return {last_return:.1f}"] if last_return is not None else []
        told = ", ".join([*details, note] if note else details)
        say(f"{title} {done}/{total}, {now - started:.0f} s, {left:.0f} s left  {told}".rstrip())

    return advance


class _StageTable(Progress):
    """A live table on standard error, with a row per stage; what the program prints appears above it."""

    def __init__(self) -> None:
        stage, note = (Column(name, no_wrap=True, ratio=1) for name in ("stage", ""))
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=stage),
            MofNCompleteColumn(table_column=_right("done")),
            _RateColumn(table_column=_right("rate")),
            TimeRemainingColumn(compact=True, table_column=_right("time left")),
            TextColumn("{task.fields[loss]}", table_column=_right("loss")),
            TextColumn("{task.fields[last_return]}", table_column=_right("last return")),
            TextColumn("{task.fields[note]}", markup=False, table_column=note),
            console=Console(stderr=True),
            # Standard output may be a file, and its lines then stay out of the terminal.
            redirect_stdout=Console().is_terminal,
            expand=True,
        )

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """The rows under a header."""
        table = super().make_tasks_table(tasks)
        table.show_header = True
        return table

    def add_stage(self, title: str, total: int, finished: int) -> Advance:
        """Adds a row for a stage; drops the oldest of many finished rows."""
        for old in [task.id for task in self.tasks if task.finished][:-FINISHED_ROWS]:
            self.remove_task(old)
        row = self.add_task(title, total=total, completed=finished, loss="", last_return="", note="")

        def advance(
            done: int, note: str = "", *, loss: float | None = None, last_return: float | None = None
        ) -> None:
            fields: dict[str, Any] = {"note": note}  # a figure that is None stays as it was
            if loss is not None:
                fields["loss"] = f"{loss:.4f}"
            if last_return is not None:
                fields["last_return"] = f"{last_return:.1f}"
            self.update(row, completed=done, **fields)

        return advance


class _RateColumn(ProgressColumn):
    """Units per second, or seconds per unit where that is less than one."""

    def render(self, task: Task) -> Text:
        """The rate of the stage's last half minute."""
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:,.1f}/s" if task.speed >= 1 else f"{1 / task.speed:,.1f} s each")


def _right(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)
