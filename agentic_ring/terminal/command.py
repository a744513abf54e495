"""Running of a command: a user's error is one message, a request to stop another, and each an exit status."""

import errno
import sys
from collections.abc import Callable
from typing import NoReturn

from agentic_ring.distributed.watchdog import await_lost_process, kept_reason, leave_job
from agentic_ring.errors import EXIT_STOPPED, AgenticRingError
from agentic_ring.jax_settings import skip_absent_tpus
from agentic_ring.stopping import StopListener


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Calls ``command``, which may parse flags first, and exits.

    Exit status: what it returns (None is 0); 1 with one message on standard error for an
    ``AgenticRingError`` (unless it names another status) or a full disk; 2 for wrong flags; 75 with one line
    after SIGTERM, SIGUSR1 or Ctrl-C, where the same command continues the work; 130 after a second Ctrl-C.
    """
    skip_absent_tpus()
    listener = StopListener()
    try:
        listener.start()
        status = _status(command)
        listener.settle()
    except BaseException as error:
        listener.settle()
        request = _stop_behind(error)
        if request is None:
            await_lost_process(error)
            raise
        print(f"{str(request) or 'interrupted'}; run the same command again to continue", file=sys.stderr)
        status = EXIT_STOPPED
    finally:
        listener.close()
    leave_job(status)
    sys.exit(status)


def _status(command: Callable[[], int | None]) -> int:
    """Calls the command; returns its exit status after printing the message of an error of the user."""
    try:
        with kept_reason():
            return command() or 0
    except AgenticRingError as error:
        if _stop_behind(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if error.errno != errno.ENOSPC or _stop_behind(error):
            raise
        print(
            f"error: no space left on the disk while writing {error.filename}; free some and run "
            "the same command again",
            file=sys.stderr,
        )
        return 1


def _stop_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The request to stop that this error is, or during whose handling it was raised."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error
