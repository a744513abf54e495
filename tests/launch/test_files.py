"""The files of ``launch/`` are valid shell and valid for their schedulers; a TPU slice is requested again."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
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


def shellcheck(*arguments: object, text: str | None = None) -> None:
    command = [SHELLCHECK, "--norc", *map(str, arguments)]
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu_pod.sh"])
def test_scripts_are_sound_and_executable(name):
    shellcheck(LAUNCH / name)
    assert (LAUNCH / name).stat().st_mode & 0o111


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
    assert (LAUNCH.parent / container["command"][1]).exists()


def test_the_sky_pilot_task_recovers_after_a_loss():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    codes = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {EXIT_STOPPED, EXIT_PROCESS_LOST, 134, 137, 143} == set(codes)
    for script in (task["setup"], task["run"]):
        shellcheck("--shell=bash", "-", text=script)
    assert (LAUNCH.parent / task["envs"]["COMMAND"].split()[1]).exists()


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
