"""Where a process of a job is killed, stopped or hangs, the others say so, and end within a bounded time."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentic_ring.errors import EXIT_PROCESS_LOST
from tests.data.synthetic import random_store
from tests.training.worker_processes import messages

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DEVICES = 4  # of all processes


@contextmanager
def started(directory: Path, processes: int, *flags: object, **variables: object) -> Iterator[list]:
    """Processes of a training job, with these flags and environment variables."""
    store = random_store(directory / "store.h5", [12] * 6)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.training.disturbed_worker", "--store", store]
    command += ["--directory", directory, "--devices", DEVICES // processes, *flags]
    variables |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": processes}
    variables |= {"PYTHONFAULTHANDLER": 1}
    environments = [variables | {"JAX_PROCESS_ID": number} for number in range(processes)]
    job = [
        subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in environment.items()},
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        yield job
    finally:
        for worker in job:
            worker.kill()
            worker.communicate()


def await_steps(job: list[subprocess.Popen], directory: Path, steps: int) -> None:
    """Waits until a job has logged this number of steps."""
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        for worker in job:
            assert worker.poll() is None, worker.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(worker: subprocess.Popen) -> tuple[int, list[str]]:
    """Waits for the end of a process; returns its status and what it says besides its progress."""
    _, errors = worker.communicate(timeout=400)
    return worker.returncode, messages(errors)


@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_the_other_says_that_a_process_was_lost_and_ends(tmp_path, victim, number):
    with started(tmp_path, 2, "--steps", 100_000) as job:
        await_steps(job, tmp_path, 4)
        job[victim].send_signal(number)
        lost = time.monotonic()
        _, errors = job[1 - victim].communicate(timeout=400)
        assert time.monotonic() - lost < 120
    # By ours after a failed collective, or by JAX's abort.
    assert job[1 - victim].returncode in (EXIT_PROCESS_LOST, -signal.SIGABRT), errors
    assert re.search(r"another process of the job was lost|another task died|heartbeat", errors), errors


def test_a_job_whose_steps_hang_ends(tmp_path):
    """The heartbeats go on, and the other process waits in a collective."""
    with started(tmp_path, 2, "--steps", 100_000, "--hang", 6, AGENTIC_RING_HANG_SECONDS=10) as job:
        outputs = [ended(worker) for worker in job]
    assert EXIT_PROCESS_LOST in [status for status, _ in outputs], outputs
    assert all(status in (EXIT_PROCESS_LOST, -signal.SIGABRT) for status, _ in outputs), outputs
    assert any("no training step has ended" in line for _, lines in outputs for line in lines), outputs


def test_where_the_first_process_fails_the_others_say_so(tmp_path):
    with started(tmp_path, 2, "--steps", 2, "--fail") as job:
        outputs = [ended(worker) for worker in job]
    assert outputs[0] == (1, ["error: there is no data"])
    assert outputs[1] == (1, ["error: process 0 failed in stage 'data'; its output says why"])
