"""Cells of an experiment: independent parts, each computed in a process of its own.

A cell is finished once its folder has a ``results.json``; a stopped one continues from its last checkpoint.
"""

import os
import subprocess
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

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


AnyCell = TypeVar("AnyCell", bound=Cell)


def is_finished(cell: Cell, output: Path) -> bool:
    """Whether the cell's results are in its folder below the experiment's."""
    return (cell.folder(output) / RESULTS_FILE).exists()


def run_cells(
    cells: Sequence[AnyCell], output: Path, workers: int, environment: Mapping[str, str] | None = None
) -> Generator[AnyCell, None, None]:
    """Runs the unfinished cells, ``workers`` processes at a time; yields each finished one.

    The output of a process goes to ``log.txt`` in the cell's folder. A request to stop is passed on to the
    processes, which save their work.

    Args:
      cells: parts of the experiment; started in this order.
      output: folder of the experiment.
      workers: number of processes at a time.
      environment: variables of the processes, added to those of this process.

    Raises:
      CellFailedError: a cell failed; raised after all others have ended, it names the cell and its log.
    """
    processes = _Processes({**os.environ, **(environment or {})})
    failures = []
    with ThreadPoolExecutor(workers) as pool:
        unfinished = [cell for cell in cells if not is_finished(cell, output)]
        waiting = {pool.submit(processes.run, cell, output): cell for cell in unfinished}
        try:
            yield from (cell for cell in cells if cell not in unfinished)
            for future in as_completed(waiting):
                failure = future.result()
                if failure is None:
                    yield waiting[future]
                else:
                    failures.append(failure)
        finally:
            processes.stop()
    if failures:
        raise CellFailedError("; ".join(failures))


def run_with_progress(
    title: str,
    cells: Sequence[Cell],
    output: Path,
    workers: int,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs the unfinished cells as ``run_cells`` does, and shows under ``title`` how many are finished."""
    before = sum(is_finished(cell, output) for cell in cells)
    with progress(title, len(cells), finished=before) as advance:
        for done, cell in enumerate(run_cells(cells, output, workers, environment), start=1):
            advance(done, str(cell))


class _Processes:
    """The processes that run, until ``stop``."""

    def __init__(self, environment: Mapping[str, str]):
        self._environment = environment
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = Lock()

    def run(self, cell: Cell, output: Path) -> str | None:
        """Computes a cell in a process; returns a message if it failed."""
        log = cell.folder(output) / "log.txt"
        with log.open("a") as file:
            with self._lock:
                if self._stopped:
                    return f"{cell} was not started"
                process = subprocess.Popen(
                    cell.command(output), stdout=file, stderr=file, env=self._environment
                )
                self._running.add(process)
            status = process.wait()
        with self._lock:
            self._running.remove(process)
        if status == 0:
            return None
        last = [line for line in log.read_text().splitlines() if line.strip()][-1:]
        return f"{cell} failed ({''.join(last)}); see {log}"

    def stop(self) -> None:
        """Starts no other process, and tells those that run to save their work and end."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()
