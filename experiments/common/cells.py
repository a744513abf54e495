"""Cells of an experiment: independent parts, each computed in a process of its own.

A cell is finished once its folder has a ``results.json``; a stopped one continues from its last checkpoint.
"""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Protocol, Self, TypeVar

from agentic_ring.errors import AgenticRingError
from agentic_ring.terminal.progress import progress

RESULTS_FILE = "results.json"


class CellFailedError(AgenticRingError, RuntimeError):
    """A cell's process ended with an error."""


class Cell(Protocol):
    """A part of an experiment; its text names it in messages."""

    def folder(self, output: Path) -> Path:
        """The cell's folder below the experiment's."""
        ...

    def command(self, output: Path) -> list[str]:
        """Command of the process that computes the cell."""
        ...


Item = TypeVar("Item")
Value = TypeVar("Value")


def is_finished(cell: Cell, output: Path) -> bool:
    """Whether the cell's results are in its folder below the experiment's."""
    return (cell.folder(output) / RESULTS_FILE).exists()


def run_cells(
    title: str,
    cells: Sequence[Cell],
    output: Path,
    workers: int,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs the unfinished cells in this order in a ``CellPool``; shows under ``title`` how many are finished.

    After all have ended, those that failed are counted and named, with their logs, by a ``CellFailedError``.
    """
    unfinished, failures = [cell for cell in cells if not is_finished(cell, output)], []
    done = len(cells) - len(unfinished)
    with (
        progress(title, len(cells), finished=done) as advance,
        CellPool(output, workers, environment=environment) as pool,
    ):
        for cell, failure in pool.each(pool.run, unfinished):
            if failure is None:
                advance(done := done + 1, str(cell))
            else:
                failures.append(failure)
    if failures:
        raise CellFailedError(f"{len(failures)} of {len(cells)} cells failed: {'; '.join(failures)}")


class CellPool:
    """Processes of cells, and threads that wait for them; use it in a ``with`` statement.

    What a process prints goes to ``log.txt`` in the cell's folder. At the end of the block, as after a
    request to stop, processes that still run are told to save their work and end, and no other is started.

    Args:
      output: folder of the experiment.
      workers: number of processes at a time.
      seconds: time after which a process is killed; by default none is.
      environment: variables of the processes, added to those of this process.
    """

    def __init__(
        self,
        output: Path,
        workers: int,
        seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self._output, self._seconds = output, seconds
        self._environment = {**os.environ, **(environment or {})}
        self._threads = ThreadPoolExecutor(workers)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()
        self._threads.shutdown(cancel_futures=True)

    def each(self, function: Callable[[Item], Value], items: Iterable[Item]) -> Iterator[tuple[Item, Value]]:
        """Calls the function, ``workers`` calls at a time; yields each item with its value."""
        waiting = {self._threads.submit(function, item): item for item in items}
        return ((waiting[future], future.result()) for future in as_completed(waiting))

    def run(self, cell: Cell) -> str | None:
        """Computes a cell in a process; returns a message if it failed."""
        log = cell.folder(self._output) / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            with self._lock:
                if self._stopped:
                    return f"{cell} was not started"
                command = cell.command(self._output)
                process = subprocess.Popen(command, stdout=file, stderr=file, env=self._environment)
                self._running.add(process)
            try:
                end = f"status {process.wait(self._seconds)}"
            except subprocess.TimeoutExpired:
                process.kill()
                end = f"no end after {self._seconds:g} s, status {process.wait()}"
        with self._lock:
            self._running.remove(process)
        if process.returncode == 0:
            return None
        lines = log.read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "no output")
        return f"{cell} failed ({end}: {last[:300]}); see {log}"
