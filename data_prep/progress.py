"""Progress as a bar on a terminal, and as plain lines where the output is a file or a pipe."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")
_LINE_INTERVAL_SECONDS = 10.0


class Meter:
    """Counts towards ``total`` and shows how far it is; a context manager."""

    def __init__(self, total: int, description: str):
        self._total, self._description, self._done = total, description, 0
        console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self._bar.add_task(description, total=total) if self._bar else None
        self._last_line = time.monotonic()

    def __enter__(self) -> "Meter":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Adds ``count``; ``note`` is shown beside the description."""
        self._done += count
        text = f"{self._description} {note}".rstrip()
        if self._bar and self._task is not None:
            self._bar.update(self._task, advance=count, description=text)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_INTERVAL_SECONDS or self._done == self._total:
            print(f"{text}: {self._done}/{self._total}", file=sys.stderr, flush=True)
            self._last_line = now


def track(items: Iterable[Item], total: int, description: str) -> Iterator[Item]:
    """Passes ``items`` on and shows the progress."""
    with Meter(total, description) as meter:
        for item in items:
            yield item
            meter.advance()
