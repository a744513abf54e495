"""Progress of long jobs: a progress bar on a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

LOG_INTERVAL_SECONDS = 15.0

Advance = Callable[[int, str], None]
"""(done, note) -> None: ``done`` units are finished; the note is shown after the bar."""


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Shows the progress of a job of ``total`` units, on process 0 only.

    Example:
      with progress("training", steps) as advance:
          for step in range(steps):
              advance(step + 1, f"loss {loss:.3f}")
    """
    if jax.process_index() != 0:
        yield lambda done, note: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
            task = bar.add_task(title, total=total, note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
    else:
        yield _line_logger(title, total)


def say(message: str) -> None:
    """Prints one line for the user on standard error, on process 0 only."""
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)


def _line_logger(title: str, total: int) -> Advance:
    started = time.monotonic()
    last_line = started

    def advance(done: int, note: str) -> None:
        nonlocal last_line
        now = time.monotonic()
        if done < total and now - last_line < LOG_INTERVAL_SECONDS:
            return
        last_line = now
        left = (now - started) / done * (total - done) if done else float("nan")
        say(f"{title} {done}/{total}, {now - started:.0f} s, {left:.0f} s left  {note}".rstrip())

    return advance
