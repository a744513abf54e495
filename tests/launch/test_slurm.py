"""The Slurm script queues a job again after a stop or a loss; it then ends as one that was not disturbed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED
from tests.data.synthetic import random_store
from tests.training.worker import train_tiny
from tests.training.worker_processes import await_rows, losses, measured, messages, worker_command

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
    """A Slurm with one node of two tasks: this machine."""

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
            "SLURM_NTASKS": 2,
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

    def ended(self, script: subprocess.Popen) -> tuple[int, str, str]:
        """Exit status of the script, what it asked of Slurm, and what its tasks printed as errors."""
        _, errors = script.communicate(timeout=400)
        return script.returncode, self.requests.read_text() if self.requests.exists() else "", errors


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
    assert script.stdout is not None
    assert script.stdout.readline().startswith("python experiments/exorl_at_ring.py ")
    assert cluster.ended(script)[:2] == (status, request_)


@pytest.mark.slow
def test_a_job_that_was_stopped_and_lost_a_process_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    cluster, steps = Cluster(tmp_path), 40
    store = random_store(tmp_path / "store.h5", [12] * 6)
    whole, disturbed, one = (tmp_path / name for name in ("whole", "disturbed", "one"))

    def start(folder: Path, restarts: int = 0) -> subprocess.Popen:
        flags = {"distributed": True, "devices": 2, "data": 2, "steps": steps}
        number = os.getpid() + restarts + (folder == whole)  # JAX takes its port from it
        return cluster.start(number, restarts, *worker_command(store, folder, **flags))

    first = start(disturbed)
    await_rows(disturbed, 5, first)
    os.kill(int(cluster.pids.read_text().split()[1]), signal.SIGTERM)
    status, requested, printed = cluster.ended(first)
    assert (status, requested) == (EXIT_STOPPED, f"requeue {os.getpid()}\n"), printed
    rows = len(measured(disturbed))
    assert rows < steps, "the signal came too late to prove anything"
    saved = f"saved at step {rows} of {steps}; run the same command again to continue"
    said = [f"stopped by another process, {saved}", f"stopped by SIGTERM, {saved}"]
    assert sorted(messages(printed)) == sorted(said)

    second = start(disturbed, restarts=1)
    await_rows(disturbed, rows + 5, second)
    os.kill(int(cluster.pids.read_text().split()[1]), signal.SIGKILL)
    status, requested, printed = cluster.ended(second)
    assert (status, requested) == (128 + signal.SIGKILL, f"requeue {os.getpid() + 1}\n"), printed
    assert re.search(r"another process of the job was lost|another task died|heartbeat", printed), printed
    assert not list(disturbed.glob("weights-*.npy")), "the kill came too late to prove anything"

    for folder, restarts in ((disturbed, 2), (whole, 2)):
        status, requested, printed = cluster.ended(start(folder, restarts))
        assert (status, requested) == (0, ""), printed
    weights = [np.load(folder / f"weights-{n}.npy") for folder in (whole, disturbed) for n in (0, 1)]
    for others in weights[1:]:
        np.testing.assert_array_equal(others, weights[0])
    assert measured(disturbed) == measured(whole)
    # As one process trains; later losses may differ by more than rounding.
    train_tiny(store, one, steps, data=2, devices=jax.devices()[:4])
    np.testing.assert_allclose(losses(whole)[:8], losses(one)[:8], rtol=1e-5)
