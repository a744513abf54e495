"""Records that make a run repeatable: command, commit, hardware and versions."""

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

SOURCE = Path(__file__).resolve().parent.parent
"""The folder that holds the package: the checkout's root, unless installed from a wheel."""

REPORTED_PACKAGES = (
    *("agentic_ring", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "h5py"),
    *("dm_control", "mujoco", "gymnasium", "shimmy", "tokenizers", "torch", "transformers", "wonderwords"),
)
"""Packages whose version can change a reported number."""


def provenance() -> dict[str, Any]:
    """The running command, its commit (None outside a checkout), hardware and versions, as JSON has them.

    Call it after ``jax.distributed`` and simulated devices are set up, as it asks for the devices.
    """
    return {"command": command_line(), "commit": git_commit(), "hardware": hardware(), "versions": versions()}


def command_line() -> str:
    """This process's command, ready to paste into a shell at the root of any machine's checkout."""
    return shlex.join(["python", *(argument.removeprefix(f"{SOURCE}/") for argument in sys.orig_argv[1:])])


def git_commit(directory: Path = SOURCE) -> str | None:
    """The commit checked out in ``directory``, with the suffix ``-dirty`` if tracked files differ.

    None if ``directory`` is not the root of a git checkout (an installed wheel may lie inside another
    project's checkout) or git cannot be run.
    """
    git = ("git", "-C", str(directory))
    root, commit = _output(*git, "rev-parse", "--show-toplevel"), _output(*git, "rev-parse", "HEAD")
    changes = _output(*git, "status", "--porcelain", "--untracked-files=no")
    if root is None or commit is None or changes is None or Path(root).resolve() != directory.resolve():
        return None
    return f"{commit}-dirty" if changes else commit


def hardware() -> dict[str, Any]:
    """The processor, its memory (None where unknown) and the devices on which JAX computes.

    ``cores`` are those that this process may use, ``devices`` those of all processes, ``simulated`` if
    several share one CPU.
    """
    devices = jax.devices()
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "simulated": devices[0].platform == "cpu" and len(devices) > 1,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of each installed package among ``REPORTED_PACKAGES``."""
    found = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _output(*command: str) -> str | None:
    """The stripped output of a command; None if it fails or does not exist."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"^model name\s*:\s*(.*\S)", cpuinfo.read_text(), re.M)):
        return found[1]
    apple = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return apple or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None
