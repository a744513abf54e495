"""Scripts as users start them: with flags in this process, or in one of their own."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentic_ring.terminal import cli


def exit_status(main: Callable[..., int | None], *flags: object) -> int | str | None:
    """Calls ``main`` by its command line, in this process, and returns the exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.run(main, args=[str(flag) for flag in flags])
    return ended.value.code


def run_python(*arguments: object, timeout: float = 300, **options) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments in a process of its own, and keeps what it prints."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)


def run_on_small_disk(disk: Path, size: str, module: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code, to which ``test`` is a module, in a process that has a disk of this size at ``disk``."""
    command, mount = ["unshare", "-rm", "sh", "-c"], f"mount -t tmpfs -o size={size} tmpfs {disk}"
    if shutil.which("unshare") is None or subprocess.run([*command, mount], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk in a namespace")
    code = f"import pathlib, sys, {module} as test\ndisk = pathlib.Path(sys.argv[1])\n{code}"
    python = [f'{mount} && exec "$0" -c "$1" "$2"', sys.executable, code, str(disk)]
    return subprocess.run([*command, *python], capture_output=True, text=True)
