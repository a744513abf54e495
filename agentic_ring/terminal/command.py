"""Running of a command: a user's error is one message, a request to stop another, and each an exit status."""

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from agentic_ring.distributed import end_job, is_lost_process
from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED, EXIT_UNREAD, AgenticRingError
from agentic_ring.jax_settings import skip_absent_tpus
from agentic_ring.stopping import StopListener


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Calls ``command``, which may parse flags first, and exits.

    Exit status: what it returns (None is 0); 1 with one message on standard error for an
    ``AgenticRingError`` (unless it names another status) or a full disk; 2 for wrong flags; 75 with one line
    after SIGTERM, SIGUSR1 or Ctrl-C, where the same command continues the work; 76 where another process of
    the job was lost; 130 after a second Ctrl-C; 141 where nobody reads the output any more.
    """
    skip_absent_tpus()
    listener = StopListener()
    try:
        listener.start()
        status = command() or 0
        listener.settled = True
        sys.stdout.flush()
    except BaseException as error:
        listener.settled = True
        helped = isinstance(error, SystemExit) and not error.code
        unread = (helped or isinstance(error, BrokenPipeError)) and _is_unread()
        message, status = ("", EXIT_UNREAD) if unread else _explained(error)
        if not message and not unread:
            if isinstance(error, Exception) and jax.distributed.is_initialized():
                traceback.print_exception(error)
                end_job(1)
            raise
        if message:
            print(message, file=sys.stderr)
    finally:
        listener.close()
    end_job(status)
    sys.exit(status)


def _is_unread() -> bool:
    """Whether the reader of the output has left; what was not written yet is dropped then."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # it is no file
        return False
    waiting = select.poll()
    waiting.register(output, 0)
    if not any(event & select.POLLERR for _, event in waiting.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _explained(error: BaseException) -> tuple[str, int]:
    """The message for the user, and the exit status; no message for an error of the program's own."""
    again = "run the same command again to continue"
    request: BaseException | None = error
    while request is not None and not isinstance(request, KeyboardInterrupt):
        request = request.__cause__ or request.__context__  # it may be what another error was raised from
    if request is not None:
        return f"{str(request) or 'interrupted'}; {again}", EXIT_STOPPED
    if is_lost_process(error):
        reason = str(error).partition("\n")[0]
        return f"error: another process of the job was lost ({reason:.300}); {again}", EXIT_PROCESS_LOST
    if isinstance(error, AgenticRingError):
        return f"error: {error}", error.exit_status
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        full = f"error: no space left on the disk while writing {error.filename}"
        return f"{full}; free some and run the same command again", 1
    return "", 1
