"""Progress of long jobs: one live table on a terminal, occasional lines elsewhere."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import jax

if TYPE_CHECKING:
    from agentic_ring.terminal.progress_table import StageTable

LOG_INTERVAL_SECONDS = 15.0

_open_tables: "list[StageTable]" = []
"""The table that is live, if any: a terminal has room for one."""


class Advance(Protocol):
    """Reports the progress of a job."""

    def __call__(
        self, done: int, note: str = "", *, loss: float | None = None, last_return: float | None = None
    ) -> None:
        """Reports that ``done`` units are finished.

        Args:
          note: anything else, in a few words.
          loss: loss of the last update.
          last_return: return of the last episode or trial, a mean where there were several.
        """
        ...


@contextmanager
def live_table() -> Iterator[None]:
    """Shows all progress within the block in one live table, if standard error is a terminal."""
    if _open_tables or jax.process_index() != 0 or not _is_interactive():
        yield
        return
    from agentic_ring.terminal.progress_table import StageTable

    with StageTable() as table:
        _open_tables.append(table)
        try:
            yield
        finally:
            _open_tables.clear()


@contextmanager
def progress(title: str, total: int, finished: int = 0) -> Iterator[Advance]:
    """Shows the progress of a job of ``total`` units, on process 0 only.

    It is a row of the live table on a terminal. Elsewhere, and where CI or NO_COLOR is set or TERM is dumb,
    it is a line every 15 s. ``finished`` units were done before, by a run that this one continues.

    Example:
      with progress("training", steps) as advance:
          for step in range(steps):
              advance(step + 1, loss=loss)
    """
    if jax.process_index() != 0:
        yield lambda done, note="", *, loss=None, last_return=None: None
        return
    with live_table():
        if not _open_tables:
            yield _line_logger(title, total, finished)
            return
        row = _open_tables[0].add_stage(title, total, finished)
        yield lambda done, note="", *, loss=None, last_return=None: row.update(done, note, loss, last_return)


def say(message: str) -> None:
    """Prints one line for the user on standard error, on process 0 only."""
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)


def _is_interactive() -> bool:
    """Whether a table can be redrawn on standard error, and the user has not asked for plain text."""
    plain = (
        os.environ.get("CI") or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    )
    return sys.stderr.isatty() and not plain


def _line_logger(title: str, total: int, finished: int) -> Advance:
    started = time.monotonic()
    last_line = started

    def advance(
        done: int, note: str = "", *, loss: float | None = None, last_return: float | None = None
    ) -> None:
        nonlocal last_line
        now = time.monotonic()
        if done < total and now - last_line < LOG_INTERVAL_SECONDS:
            return
        last_line = now
        left = (now - started) / (done - finished) * (total - done) if done > finished else float("nan")
        figures = [f"loss {loss:.4f}"] if loss is not None else []
        figures += [f"return {last_return:.1f}"] if last_return is not None else []
        details = ", ".join([*figures, *([note] if note else [])])
        say(f"{title} {done}/{total}, {now - started:.0f} s, {left:.0f} s left  {details}".rstrip())

    return advance
