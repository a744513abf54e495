"""Where a process of a job is killed, stopped or hangs, the others say which one, and end with status 76."""

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

import numpy as np
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
    ("processes", "victim", "number"),
    [(2, 1, signal.SIGKILL), (2, 0, signal.SIGKILL), (2, 1, signal.SIGSTOP), (4, 2, signal.SIGKILL)],
)
def test_the_others_name_the_lost_process_and_end(tmp_path, processes, victim, number):
    with started(tmp_path, processes, "--steps", 100_000) as job:
        await_steps(job, tmp_path, 4)
        job[victim].send_signal(number)
        lost = time.monotonic()
        for worker in (worker for worker in job if worker is not job[victim]):
            status, lines = ended(worker)
            assert time.monotonic() - lost < 60
            assert len(lines) == 1, lines
            assert re.match(
                rf"error: process {victim} was lost at step \d+: .*run the same command", lines[0]
            )
            assert status == EXIT_PROCESS_LOST


def test_a_process_that_hangs_is_named(tmp_path):
    """Its heartbeat goes on, and the others wait for it in a collective."""
    with started(tmp_path, 2, "--steps", 100_000, "--hang", 6, AGENTIC_RING_HANG_SECONDS=10) as job:
        for worker in job:
            status, lines = ended(worker)
            assert len(lines) == 1, lines
            assert re.match(r"error: process 1 hangs at step 6: the others wait", lines[0])
            assert status == EXIT_PROCESS_LOST


def test_a_first_process_that_is_busy_is_waited_for(tmp_path):
    """Gloo, in which the processes of CPUs wait, gives up after 30 s."""
    with started(tmp_path, 2, "--steps", 2, "--busy", 45) as job:
        errors = [worker.communicate(timeout=400)[1] for worker in job]
    assert [worker.returncode for worker in job] == [0, 0], errors
    assert re.search(r"process 1 has waited 1\d s for process 0: data by process 0", errors[1])
    weights = [np.load(tmp_path / f"weights-{number}.npy") for number in range(2)]
    np.testing.assert_array_equal(*weights)


def test_where_the_first_process_fails_the_others_say_so(tmp_path):
    with started(tmp_path, 2, "--steps", 2, "--fail") as job:
        outputs = [ended(worker) for worker in job]
    assert outputs[0] == (1, ["error: there is no data"])
    assert outputs[1] == (
        1,
        ["error: process 0 failed in stage 'data': there is no data; its output says more"],
    )
