"""No request to stop is lost, whatever code it meets."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from agentic_ring.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from agentic_ring.stopping import SIGNALS
from tests.commands import exit_status


@pytest.fixture(autouse=True)
def same_handlers():
    """The signals have their earlier handlers after each test."""
    before = [sys.unraisablehook, *map(signal.getsignal, SIGNALS)]
    yield
    assert [sys.unraisablehook, *map(signal.getsignal, SIGNALS)] == before
    assert all(thread.name != "stop-listener" for thread in threading.enumerate())


def test_a_request_that_a_destructor_discards_comes_again(capsys):
    """A signal arrives in ``__del__``, where Python discards exceptions."""

    class RaisesWhenDeleted:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def main() -> None:
        RaisesWhenDeleted()
        time.sleep(60)
        raise AssertionError

    assert exit_status(main) == EXIT_STOPPED
    assert capsys.readouterr().err.endswith("stopped by SIGTERM; run the same command again to continue\n")


def test_a_second_request_does_not_break_the_cleaning_up_after_the_first():
    cleaned = []

    def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            cleaned.append("up")

    assert exit_status(main) == EXIT_STOPPED
    assert cleaned == ["up"]


def test_ctrl_c_before_the_handlers_are_installed_stops_the_command_too(capsys, monkeypatch):
    def interrupt(*_, **__) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(signal, "set_wakeup_fd", interrupt)
        assert exit_status(lambda: None) == EXIT_STOPPED
    assert capsys.readouterr().err == "interrupted; run the same command again to continue\n"


BUSY = """
import hashlib
from agentic_ring.terminal.command import run_command

def main():
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)

run_command(main)
"""


def test_a_second_interrupt_ends_at_once_also_within_compiled_code():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        for _ in range(2):
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == EXIT_INTERRUPTED
