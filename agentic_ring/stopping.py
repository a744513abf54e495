"""Requests to stop a command: SIGTERM, SIGUSR1 and Ctrl-C, so that the same command continues it later.

A request raises ``StopRequested`` in the main thread, except within ``deferred``: there training reads the
request, and ends once its last step is saved. A second Ctrl-C ends the process at once, even where the main
thread waits in compiled code.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from agentic_ring.errors import EXIT_INTERRUPTED, StopRequested

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_listener: "StopListener | None" = None


@contextmanager
def deferred() -> Iterator[Callable[[], str | None]]:
    """Raises no request within the block; yields a function that names the signal that came, or None.

    The block answers a request with a ``StopRequested`` of its own; otherwise it is raised at its end.
    """
    listener = _listener
    if listener is None:
        yield lambda: None
        return
    listener.deferred = True
    try:
        yield lambda: listener.requested_by
    except StopRequested:
        listener.raised = True
        raise
    finally:
        listener.deferred = False
    listener.raise_pending()


class StopListener:
    """Receives the signals between ``start`` and ``close``; there is one per process, in its main thread."""

    def __init__(self) -> None:
        self.requested_by: str | None = None
        """Name of the first signal, or None."""
        self.deferred = False
        self.raised = False
        self.settled = False
        """The command has ended: from now on a request raises nothing."""
        self._undo = ExitStack()
        self._previous_hook = sys.unraisablehook

    def start(self) -> None:
        """Installs the handlers."""
        global _listener
        _listener = self
        # Ctrl-C may come before all is installed, and then undoes what is. The handlers go last.
        for number in SIGNALS:
            self._undo.callback(signal.signal, number, signal.getsignal(number))
        self._undo.callback(setattr, sys, "unraisablehook", self._previous_hook)
        reader, writer = os.pipe()
        self._undo.callback(os.close, reader)
        os.set_blocking(writer, False)
        watcher = threading.Thread(target=_watch, args=(reader,), name="stop-listener", daemon=True)
        watcher.start()
        self._undo.callback(watcher.join)
        self._undo.callback(os.close, writer)
        sys.unraisablehook = self._discarded
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def close(self) -> None:
        """Gives the signals back to their earlier handlers."""
        global _listener
        _listener = None
        self.settled = True
        self._undo.close()

    def raise_pending(self) -> None:
        """Raises the request that has come, if any, once."""
        if self.requested_by and not (self.deferred or self.raised or self.settled):
            self.raised = True
            raise StopRequested(f"stopped by {self.requested_by}")

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested_by = self.requested_by or signal.Signals(number).name
        self.raise_pending()

    def _discarded(self, unraisable: Any) -> None:
        """Python discards an exception that a signal raises within ``__del__``: it is raised again soon."""
        if not isinstance(unraisable.exc_value, StopRequested):
            self._previous_hook(unraisable)
            return
        self.raised = False
        main = threading.main_thread().ident
        again = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1))
        again.start()
        self._undo.callback(again.join)
        self._undo.callback(again.cancel)


def _watch(reader: int) -> None:
    """Ends the process at the second Ctrl-C; Python's own handlers wait for the main thread."""
    interrupts = 0
    while event := os.read(reader, 1):
        interrupts += event[0] == signal.SIGINT
        if interrupts > 1:
            os._exit(EXIT_INTERRUPTED)
