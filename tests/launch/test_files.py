"""The files of ``launch/`` are valid shell, and valid for the schedulers that read them."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SHELLCHECK = shutil.which("shellcheck", path=sysconfig.get_path("scripts")) or "shellcheck"


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
