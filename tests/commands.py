"""Scripts as users start them: with flags in this process, in one of their own, and killed."""

import subprocess
import sys
import time
from collections.abc import Callable

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


def kill_once(process: subprocess.Popen, condition: Callable[[], bool], seconds: float) -> None:
    """Kills a running process as soon as the condition holds, which it must within ``seconds``."""
    deadline = time.monotonic() + seconds
    try:
        while not condition():
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
