"""The files of ``launch/`` are valid for their schedulers, and start a job again after a stop or a loss."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED
from tests.data.synthetic import random_store
from tests.training.worker import ROOT, await_rows, losses, measured, messages, train_tiny, worker_command

LAUNCH = ROOT / "launch"
SHELLCHECK = shutil.which("shellcheck", path=sysconfig.get_path("scripts")) or "shellcheck"
# A Google Cloud whose slice is there at once; the commands on its hosts take their statuses from a file.
GCLOUD = """#!/bin/bash
cd "$(dirname "$0")" || exit 1
echo "$*" >> calls
case $3-$4 in
  queued-resources-describe) cat state 2>/dev/null ;;
  queued-resources-create) echo ACTIVE > state ;;
  queued-resources-delete) rm state ;;
  tpu-vm-ssh)
    [[ $* == *git* ]] && exit 0
    status=$(head -n 1 statuses)
    sed -i 1d statuses
    ((status == 255)) && echo SUSPENDED > state
    exit "$status"
    ;;
esac
"""


def shellcheck(text: str, *options: str) -> None:
    command = [SHELLCHECK, "--norc", *options, "-"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_scripts_are_sound_and_a_sky_pilot_task_recovers_after_a_loss():
    for path in (LAUNCH / "slurm.sbatch", LAUNCH / "tpu_pod.sh"):
        shellcheck(path.read_text())
        assert path.stat().st_mode & 0o111
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    shellcheck(task["setup"], "--shell=bash")
    shellcheck(task["run"], "--shell=bash")
    codes = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {EXIT_STOPPED, EXIT_PROCESS_LOST, 134, 137, 143} == set(codes)
    assert (ROOT / task["envs"]["COMMAND"].split()[1]).exists()


def test_the_job_set_starts_again_after_a_loss_and_fails_at_an_error_of_the_user():
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes == {"containerName": container["name"], "operator": "In", "values": [1, 2]}
    (failure,) = job_set["spec"]["failurePolicy"]["rules"]
    assert (failure["action"], failure["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    # Names and numbers that must agree.
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    host, _, port = variables["JAX_COORDINATOR_ADDRESS"].partition(":")
    name = job_set["metadata"]["name"]
    assert host == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(port) == container["ports"][0]["containerPort"]
    assert int(variables["JAX_NUM_PROCESSES"]) == job["parallelism"] == job["completions"]
    assert (ROOT / container["command"][1]).exists()


@pytest.mark.parametrize(
    ("statuses", "slices", "last"), [([0], 1, 0), ([255, 0], 2, 0), ([76, 75, 0], 1, 0), ([1], 1, 1)]
)
def test_a_preempted_slice_is_requested_again(tmp_path, statuses, slices, last):
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(GCLOUD)
    gcloud.chmod(0o755)
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    variables = {"PROJECT": "p", "ZONE": "z", "FILESTORE": "h:/s", "REPOSITORY": "r", "POLL_SECONDS": "0"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", LAUNCH / "tpu_pod.sh", "python", "train.py", "--title", "two words"]
    ended = subprocess.run(command, env=os.environ | variables, timeout=60, check=False)
    assert ended.returncode == last
    calls = (tmp_path / "calls").read_text()
    assert calls.count("queued-resources create") == calls.count("queued-resources delete") == slices
    assert calls.count(r"python train.py --title two\ words") == len(statuses)
    assert not (tmp_path / "state").exists()


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
        (folder / "bin").mkdir()
        for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
            path = folder / "bin" / name
            path.write_text(program)
            path.chmod(0o755)
        files = {"FAKE_REQUESTS": self.requests, "FAKE_PIDS": self.pids, "VENV": folder / "none"}
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.variables = files | {"PATH": path, "SLURM_NTASKS": 2, "SLURM_SUBMIT_DIR": ROOT}

    def start(self, job: int, restarts: int, *command: object, **variables: object) -> subprocess.Popen:
        """Starts the script as Slurm does, for the first time or again."""
        self.requests.unlink(missing_ok=True)
        variables |= self.variables | {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        words, pipe = ["bash", LAUNCH / "slurm.sbatch", *map(str, command)], subprocess.PIPE
        return subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True)

    def ended(self, script: subprocess.Popen) -> tuple[int, str, str, str]:
        """Exit status of the script, what it asked of Slurm, and what its tasks printed."""
        printed = script.communicate(timeout=400)
        requests = self.requests.read_text() if self.requests.exists() else ""
        return script.returncode, requests, *printed


def test_exit_statuses_that_queue_the_job_again(tmp_path):
    cluster, again = Cluster(tmp_path), "requeue 7\n"
    kept = [(0, 0, ""), (1, 0, ""), (EXIT_PROCESS_LOST, 100, "")]
    for status, restarts, request in [*kept, (EXIT_STOPPED, 0, again), (134, 99, again), (137, 0, again)]:
        *found, printed, _ = cluster.ended(cluster.start(7, restarts, FAKE_STATUS=status))
        assert found == [status, request]
        assert printed.startswith("python experiments/exorl_at_ring.py ")


@pytest.mark.slow
def test_a_job_that_was_stopped_and_lost_a_process_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    cluster, steps = Cluster(tmp_path), 24
    store = random_store(tmp_path / "store.h5", [12] * 6)
    whole, disturbed, one = (tmp_path / name for name in ("whole", "disturbed", "one"))

    def start(folder: Path, restarts: int = 0) -> subprocess.Popen:
        flags = {"distributed": True, "devices": 2, "data": 2, "steps": steps}
        number = os.getpid() + restarts + (folder == whole)  # JAX takes its port from it
        return cluster.start(number, restarts, *worker_command(store, folder, **flags))

    first = start(disturbed)
    await_rows(disturbed, 3, first)
    os.kill(int(cluster.pids.read_text().split()[1]), signal.SIGTERM)
    status, requested, _, printed = cluster.ended(first)
    assert (status, requested) == (EXIT_STOPPED, f"requeue {os.getpid()}\n"), printed
    rows = len(measured(disturbed))
    assert rows < steps, "the signal came too late to prove anything"
    saved = f"saved at step {rows} of {steps}; run the same command again to continue"
    said = [f"stopped by another process, {saved}", f"stopped by SIGTERM, {saved}"]
    assert sorted(messages(printed)) == sorted(said)

    second = start(disturbed, restarts=1)
    await_rows(disturbed, rows + 3, second)
    os.kill(int(cluster.pids.read_text().split()[1]), signal.SIGKILL)
    status, requested, _, printed = cluster.ended(second)
    assert (status, requested) == (128 + signal.SIGKILL, f"requeue {os.getpid() + 1}\n"), printed
    assert re.search(r"another process of the job was lost|another task died|heartbeat", printed), printed
    assert not list(disturbed.glob("weights-*.npy")), "the kill came too late to prove anything"

    for folder, restarts in ((disturbed, 2), (whole, 2)):
        status, requested, _, printed = cluster.ended(start(folder, restarts))
        assert (status, requested) == (0, ""), printed
    weights = [np.load(folder / f"weights-{n}.npy") for folder in (whole, disturbed) for n in (0, 1)]
    for others in weights[1:]:
        np.testing.assert_array_equal(others, weights[0])
    assert measured(disturbed) == measured(whole)
    # As one process trains; later losses may differ by more than rounding.
    train_tiny(store, one, steps, data=2, devices=jax.devices()[:4])
    np.testing.assert_allclose(losses(whole)[:8], losses(one)[:8], rtol=1e-5)
