"""The Slurm script queues a job again after a loss; with it a killed job ends with the weights of another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED
from tests.data.synthetic import random_store

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch/slurm.sbatch"

# Starts the tasks of a step on this machine as Slurm does, with the variables that JAX reads.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
if "FAKE_STATUS" in os.environ:
    print(*words)
    sys.exit(int(os.environ["FAKE_STATUS"]))
tasks = [
    subprocess.Popen(words, env=os.environ | {{
        "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
    }})
    for number in range(int(os.environ["SLURM_NTASKS"]))
]
with open(os.environ["FAKE_PIDS"], "w") as file:
    print(*[task.pid for task in tasks], file=file)
sys.exit(max(status if status >= 0 else 128 - status for status in [task.wait() for task in tasks]))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> "$FAKE_REQUESTS"\n'


class Cluster:
    """A Slurm with one node of four tasks: this machine."""

    def __init__(self, folder: Path):
        self.requests, self.pids = folder / "requests", folder / "pids"
        for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(program)
            path.chmod(0o755)
        self.variables = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_REQUESTS": self.requests,
            "FAKE_PIDS": self.pids,
            "SLURM_NTASKS": 4,
            "SLURM_SUBMIT_DIR": ROOT,
            "VENV": folder / "none",
        }

    def start(self, job: int, restarts: int, *command: object, **variables: object) -> subprocess.Popen:
        """Starts the script as Slurm does, for the first time or again."""
        self.requests.unlink(missing_ok=True)
        variables |= self.variables | {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}
        return subprocess.Popen(
            ["bash", SCRIPT, *map(str, command)],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def requested(self) -> str:
        return self.requests.read_text() if self.requests.exists() else ""


@pytest.mark.parametrize(
    ("status", "restarts", "request_"),
    [
        (0, 0, ""),
        (1, 0, ""),
        (EXIT_STOPPED, 0, "requeue 7\n"),
        (134, 99, "requeue 7\n"),
        (EXIT_PROCESS_LOST, 100, ""),
        (137, 0, "requeue 7\n"),
    ],
)
def test_exit_statuses_that_queue_the_job_again(tmp_path, status, restarts, request_):
    cluster = Cluster(tmp_path)
    script = cluster.start(7, restarts, FAKE_STATUS=status)
    output, _ = script.communicate(timeout=60)
    assert script.returncode == status
    assert cluster.requested() == request_
    assert output.startswith("python experiments/exorl_at_ring.py ")


@pytest.mark.slow
def test_a_job_that_lost_a_process_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    cluster = Cluster(tmp_path)
    store = random_store(tmp_path / "store.h5", [12] * 6)
    folders = [tmp_path / "killed", tmp_path / "undisturbed"]
    commands = []
    for folder in folders:
        folder.mkdir()
        module = [sys.executable, "-m", "tests.training.disturbed_worker", "--devices", 1]
        commands.append([*module, "--store", store, "--directory", folder, "--steps", 60])

    first = cluster.start(os.getpid(), 0, *commands[0])
    metrics = folders[0] / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(int(cluster.pids.read_text().split()[2]), signal.SIGKILL)
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 128 + signal.SIGKILL, errors
    assert cluster.requested() == f"requeue {os.getpid()}\n"
    assert not list(folders[0].glob("weights-*.npy")), "the kill came too late to prove anything"

    for number, (restarts, command) in enumerate([(1, commands[0]), (0, commands[1])]):
        script = cluster.start(os.getpid() + 1 + number, restarts, *command)
        _, errors = script.communicate(timeout=400)
        assert script.returncode == 0, errors
        assert cluster.requested() == ""
    weights = [np.load(folder / "weights-0.npy") for folder in folders]
    np.testing.assert_array_equal(*weights)
