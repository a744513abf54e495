import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_ring.provenance import SOURCE, command_line, git_commit, hardware, provenance, versions

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "tracked.txt").write_text("1")
    git(tmp_path, "add", "tracked.txt")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


@needs_git
def test_commit_of_a_clean_and_of_a_changed_checkout(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "untracked.txt").write_text("a run's output")
    assert git_commit(checkout) == head
    (checkout / "tracked.txt").write_text("2")
    assert git_commit(checkout) == f"{head}-dirty"


@needs_git
def test_no_commit_outside_a_checkout_or_inside_another_projects(checkout, tmp_path_factory):
    assert git_commit(tmp_path_factory.mktemp("plain")) is None
    site_packages = checkout / ".venv" / "site-packages"
    site_packages.mkdir(parents=True)
    assert git_commit(site_packages) is None
    assert git_commit(checkout / "nonexistent") is None


def test_no_commit_without_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_commit(checkout) is None


def test_command_can_be_pasted_into_a_shell():
    program = "from agentic_ring.provenance import command_line; print(command_line())"
    command = [
        sys.executable,
        "-c",
        program,
        "--note",
        "two words",
        "--from",
        str(SOURCE / "evals/report.py"),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert shown.startswith("python -c ")
    assert shown.endswith(" --note 'two words' --from evals/report.py")
    assert sys.executable not in shown


def test_hardware_counts_what_jax_sees():
    found = hardware()
    assert (found["platform"], found["devices"], found["simulated"]) == ("cpu", 8, True)
    assert found["processes"] == 1
    assert found["cores"] >= 1
    assert found["cpu"]


def test_versions_are_the_installed_ones():
    import jax
    import mujoco

    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["jax"] == jax.__version__
    assert found["mujoco"] == mujoco.__version__


def test_provenance_is_json_with_the_fields_of_the_contract():
    found = json.loads(json.dumps(provenance(), allow_nan=False))
    assert set(found) == {"command", "commit", "hardware", "versions"}
    assert found["command"] == command_line()
