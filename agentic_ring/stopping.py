"""Requests to stop a command: SIGTERM, SIGUSR1 and Ctrl-C, so that the same command continues it later.

A request raises ``StopRequested`` in the main thread, except while training runs: its loop reads the
request from ``deferred`` and ends after a step, once that step is saved. Within a function that is marked
``uninterrupted`` it waits until that has returned. A second Ctrl-C ends the process at once, even where the
main thread waits in compiled code.
"""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

from agentic_ring.errors import EXIT_INTERRUPTED, StopRequested

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_AGAIN = 0
"""Written to the watcher instead of a signal's number when a request has yet to be raised."""
_RETRY_SECONDS = 0.05
_Function = TypeVar("_Function", bound=Callable[..., Any])

_uninterrupted: set[CodeType] = set()
_listener: "StopListener | None" = None


def uninterrupted(function: _Function) -> _Function:
    """Decorator: no request is raised within the function; one that comes there is raised soon after.

    For functions that C code calls back and that must not fail, and those whose threads would run on. It
    costs their callers nothing.
    """
    _uninterrupted.add(function.__code__)
    return function


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
    except StopRequested as request:
        listener.follow(request)
        raise
    finally:
        listener.deferred = False
    listener.raise_pending()


class StopListener:
    """Receives the signals between ``start`` and ``close``; there is one per process, in its main thread.

    Python discards an exception that a signal's handler raises within ``__del__`` or a callback, and C code
    may discard one. So the listener watches the exception itself: if it is reported as discarded, or deleted,
    before ``settle`` was called, it is raised again.
    """

    def __init__(self) -> None:
        self.requested_by: str | None = None
        """Name of the first signal, or None."""
        self.deferred = False
        self._settled = False
        self._undo = ExitStack()
        self._previous_hook = sys.unraisablehook
        self._raised: weakref.ref[StopRequested] | None = None

    def start(self) -> None:
        """Installs the handlers."""
        global _listener
        _listener = self
        # Ctrl-C may come before all is installed, and then undoes what is. The handlers go last.
        for number in SIGNALS:
            self._undo.callback(signal.signal, number, signal.getsignal(number))
        self._undo.callback(setattr, sys, "unraisablehook", self._previous_hook)
        self._reader, self._writer = os.pipe()
        self._undo.callback(os.close, self._reader)
        os.set_blocking(self._writer, False)
        watcher = threading.Thread(target=self._watch, name="stop-listener", daemon=True)
        watcher.start()
        self._undo.callback(watcher.join)
        self._undo.callback(os.close, self._writer)
        sys.unraisablehook = self._discarded
        self._undo.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        )
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def settle(self) -> None:
        """The command has ended: from now on a request raises nothing."""
        self._settled = True

    def close(self) -> None:
        """Gives the signals back to their earlier handlers."""
        global _listener
        _listener = None
        self.settle()
        self._undo.close()

    def raise_pending(self) -> None:
        """Raises the request that has come, if any, unless it is on its way already."""
        on_its_way = self._raised is not None and self._raised() is not None
        if self.requested_by is None or self.deferred or self._settled or on_its_way:
            return
        request = StopRequested(f"stopped by {self.requested_by}")
        self.follow(request)
        try:
            raise request
        finally:
            del request  # the traceback would keep it alive

    def follow(self, request: StopRequested) -> None:
        """Raises no other request as long as this one is on its way."""
        self._raised = weakref.ref(request, self._try_again)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested_by = self.requested_by or signal.Signals(number).name
        while frame is not None:
            if frame.f_code in _uninterrupted:
                self._try_again()
                return
            frame = frame.f_back
        self.raise_pending()

    def _discarded(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, StopRequested):
            self._raised = None
            self._try_again()
        else:
            self._previous_hook(unraisable)

    def _try_again(self, _: object = None) -> None:
        if not self._settled:
            os.write(self._writer, bytes([_AGAIN]))

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        interrupts = 0
        while event := os.read(self._reader, 1):
            if event[0] == signal.SIGINT:
                interrupts += 1
                if interrupts > 1:
                    os._exit(EXIT_INTERRUPTED)
            if event[0] == _AGAIN and not self._settled:
                time.sleep(_RETRY_SECONDS)  # the code that discarded or put it off has then returned
                signal.pthread_kill(main, signal.SIGUSR1)
