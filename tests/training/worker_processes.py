"""Starts ``tests.training.worker`` as one process or as a job of several, and reads what it logged."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentic_ring.training.loop import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def worker_command(store: Path, directory: Path, **flags) -> list[str]:
    directory.mkdir(exist_ok=True)
    flags = {"store": store, "directory": directory} | flags
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "tests.training.worker", *options]


def start_worker(store: Path, directory: Path, **options) -> subprocess.Popen:
    """A worker process; upper-case options are environment variables, the others flags."""
    environment = os.environ | {name: str(value) for name, value in options.items() if name.isupper()}
    flags = {name: value for name, value in options.items() if not name.isupper()}
    command = worker_command(store, directory, **flags)
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@contextmanager
def started_job(store: Path, directory: Path, **options) -> Iterator[list[subprocess.Popen]]:
    """The two worker processes of a job, with four devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": 2, "devices": 2}
    workers = [start_worker(store, directory, distributed=True, JAX_PROCESS_ID=n, **options) for n in (0, 1)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def await_rows(directory: Path, count: int, *workers: subprocess.Popen) -> None:
    """Waits until running workers have logged so many steps."""
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        for worker in workers:
            assert worker.poll() is None, worker.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(worker: subprocess.Popen) -> tuple[int, list[str]]:
    """Waits for the end of a process; returns its status and what it says besides its progress."""
    _, errors = worker.communicate(timeout=400)
    return worker.returncode, messages(errors)


def messages(printed: str) -> list[str]:
    """The lines that a process has printed besides the progress, and the waiting, of a slow machine."""
    return [line for line in printed.splitlines() if not re.match(r"training |process \d+ has waited ", line)]


def measured(directory: Path) -> list[dict[str, float]]:
    """Everything in the log except for speed."""
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [{name: row[name] for name in row.keys() - {"tokens_per_second"}} for row in rows]


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in measured(directory)]
