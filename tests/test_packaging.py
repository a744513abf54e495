"""What is shipped, what is pinned, and what ``make`` says where it cannot go on."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]


def pinned(python_version: str) -> dict[str, str]:
    """Package -> version that constraints.txt gives for a Python."""
    environment = {"python_version": python_version}
    pins = [pin for pin in PINS if pin.marker is None or pin.marker.evaluate(environment)]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins), "a package is pinned twice"
    return versions


def test_the_wheel_holds_agentic_ring_alone(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    information = f"agentic_ring-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"agentic_ring", information}
    assert {"agentic_ring/py.typed", f"{information}/licenses/LICENSE"} <= set(names)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "agentic_ring").rglob("*.py")}
    assert sources <= set(names)
    assert {
        f"agentic_ring/policies/walker_run/{file}" for file in ("config.json", "model.safetensors")
    } <= set(names)


@pytest.mark.parametrize("python_version", ["3.11", "3.12"])
def test_constraints_pin_every_dependency_within_its_bounds(python_version):
    versions = pinned(python_version)
    extras = PROJECT["optional-dependencies"]
    in_constraints = ("models", "rl", "text", "serve", "scripts", "dev", "docs", "minari", "parquet")
    for line in [*PROJECT["dependencies"], *(line for name in in_constraints for line in extras[name])]:
        requirement = Requirement(line)
        if requirement.name == "agentic_ring":
            continue
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), line


def test_constraints_hold_names_and_versions_only():
    for pin in PINS:
        assert pin.url is None
        assert [part.operator for part in pin.specifier] == ["=="]
        assert pin.marker is None or str(pin.marker).startswith("python_version")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        # An interpreter of another version fails the version check.
        (
            "exit 1",
            ("Python 3.11 or 3.12 is needed", "labmaze", "make PYTHON=/path/to/python3.12 install"),
        ),
        (
            f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"',
            (f"apt install python3.{sys.version_info.minor}-venv",),
        ),
    ],
    ids=["no fitting Python", "no ensurepip"],
)
def test_make_says_what_it_lacks(tmp_path, body, said):
    """A shell script stands for some Python interpreter."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    # Without what an outer `make test` passes on, its own VENV and PYTHON among it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode != 0
    for text in said:
        assert text in finished.stderr
    assert not (tmp_path / "venv").exists()
