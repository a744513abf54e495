"""Running of a command: a user's error is one message, a request to stop another, and each an exit status."""

import errno
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from agentic_ring.distributed import end_job, is_lost_process
from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED, AgenticRingError
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
            if isinstance(error, Exception) and jax.distributed.is_initialized():
                traceback.print_exception(error)
                end_job(1)
            raise
        print(f"{str(request) or 'interrupted'}; run the same command again to continue", file=sys.stderr)
        status = EXIT_STOPPED
    finally:
        listener.close()
    end_job(status)
    sys.exit(status)


def _status(command: Callable[[], int | None]) -> int:
    """Calls the command; returns its exit status after printing the message of an error of the user."""
    try:
        return command() or 0
    except Exception as error:
        if _stop_behind(error):
            raise
        if is_lost_process(error):
            reason = str(error).partition("\n")[0]
            lost = f"another process of the job was lost ({reason:.300})"
            print(f"error: {lost}; run the same command again to continue", file=sys.stderr)
            return EXIT_PROCESS_LOST
        if isinstance(error, AgenticRingError):
            print(f"error: {error}", file=sys.stderr)
            return error.exit_status
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
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
