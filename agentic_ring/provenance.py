"""Records that make a run repeatable: command, commit, hardware and versions."""

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

# The folder that holds the package: the checkout's root, unless installed from a wheel.
SOURCE = Path(__file__).resolve().parent.parent

# Packages whose version can change a reported number.
REPORTED_PACKAGES = (
    "agentic_ring",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "h5py",
    "dm_control",
    "mujoco",
    "gymnasium",
    "shimmy",
    "tokenizers",
    "torch",
    "transformers",
    "wonderwords",
)


def provenance() -> dict[str, Any]:
    """The running command, its source, hardware and versions.

    Starts JAX's backend, as it asks for the devices; call it after ``jax.distributed`` and the
    number of simulated devices are set.

    Returns:
      ``command`` str; ``commit`` str, or None outside a checkout; ``hardware`` and ``versions``
      dicts. All of it can be written as JSON.
    """
    return {"command": command_line(), "commit": git_commit(), "hardware": hardware(), "versions": versions()}


def command_line() -> str:
    """This process's command, ready to paste into a shell at the checkout's root.

    It has no path of the interpreter, and none of the checkout: another machine has other ones.
    """
    return shlex.join(["python", *(argument.removeprefix(f"{SOURCE}/") for argument in sys.orig_argv[1:])])


def git_commit(directory: Path = SOURCE) -> str | None:
    """The commit checked out in ``directory``, with the suffix ``-dirty`` if tracked files differ.

    None if ``directory`` is not the root of a git checkout (an installed wheel may lie inside another
    project's checkout) or git cannot be run.
    """
    root = _output("git", "-C", str(directory), "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() != directory.resolve():
        return None
    commit = _output("git", "-C", str(directory), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return f"{commit}-dirty" if changes else commit


def hardware() -> dict[str, Any]:
    """The processor, the memory and the devices on which JAX computes.

    Returns:
      ``cpu`` model name, ``cores`` this process may use, ``memory_gib`` (None where unknown),
      ``platform`` of JAX ("cpu", "gpu", "tpu"), ``device_kind``, ``devices`` (count over all
      processes), ``processes``, and ``simulated``: several devices that share one CPU.
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
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
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
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
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
