"""No request to stop is lost, whatever code it meets."""

import os
import signal
import sys
import threading
import time

from agentic_ring.errors import EXIT_STOPPED
from agentic_ring.stopping import SIGNALS
from tests.commands import exit_status


class RaisesWhenDeleted:
    """Receives a signal in ``__del__``, where Python discards exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)


def test_a_request_that_a_destructor_discards_comes_again(capsys):
    def main() -> None:
        RaisesWhenDeleted()
        time.sleep(60)

    started = time.monotonic()
    assert exit_status(main) == EXIT_STOPPED
    assert time.monotonic() - started < 30
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


def test_the_signals_have_their_earlier_handlers_afterwards():
    before = [signal.getsignal(number) for number in SIGNALS]
    assert exit_status(lambda: None) == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert all(thread.name != "stop-listener" for thread in threading.enumerate())


def test_ctrl_c_before_the_handlers_are_installed_stops_the_command_too(capsys, monkeypatch):
    hook, handlers = sys.unraisablehook, [signal.getsignal(number) for number in SIGNALS]
    with monkeypatch.context() as patch:
        patch.setattr(signal, "set_wakeup_fd", interrupt)
        assert exit_status(lambda: None) == EXIT_STOPPED
    assert capsys.readouterr().err == "interrupted; run the same command again to continue\n"
    assert sys.unraisablehook == hook
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert all(thread.name != "stop-listener" for thread in threading.enumerate())


def interrupt(*_, **__) -> None:
    raise KeyboardInterrupt
