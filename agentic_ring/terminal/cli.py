"""How every script starts and ends: its flags, one message for a user's error, and an exit status."""

import errno
import inspect
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NoReturn

import jax

from agentic_ring.distributed import end_job, is_lost_process
from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED, AgenticRingError
from agentic_ring.extras import needs_extra
from agentic_ring.jax_settings import skip_absent_tpus
from agentic_ring.stopping import StopListener

with needs_extra("models"):
    import tyro

optional_flag = partial(tyro.conf.arg, help_behavior_hint="")
"""Marks a flag whose help text itself names the default."""
switch = tyro.conf.FlagCreatePairsOff
"""Marks a flag that only turns something on: there is no ``--no-...``."""

_FLAG_SECTIONS = ("Args:", "Attributes:")
_LIST_ITEM = re.compile(r"([*-]|\d+\.) ")


def run(main: Callable[..., int | None], **tyro_options: Any) -> None:
    """Parses the command line for ``main``'s signature, calls it and exits as ``run_command`` does."""
    for documented in (main, *typing.get_type_hints(main).values()):
        if documented.__doc__ and (inspect.isfunction(documented) or is_dataclass(documented)):
            documented.__doc__ = _join_paragraphs(documented.__doc__)
    if os.environ.get("NO_COLOR"):
        tyro._experimental_options["ansi_codes"] = False
    run_command(partial(tyro.cli, main, **tyro_options))


def _join_paragraphs(docstring: str) -> str:
    """Joins the lines of each paragraph and of each flag's description into one line.

    The width of the terminal then decides where help breaks. Lists and indented code keep their lines.
    """
    lines: list[str] = []
    entry_indent = None  # of the flags' names, within a section that describes flags
    for line in inspect.cleandoc(docstring).splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        before = lines[-1] if lines else ""
        if text and not indent:
            entry_indent = None
        if before in _FLAG_SECTIONS:
            entry_indent = indent
        if entry_indent is None:
            continues = not indent and not before.startswith(" ") and not before.endswith(":")
        else:
            continues = indent > entry_indent
        if continues and text and before and not _LIST_ITEM.match(text):
            lines[-1] += f" {text}"
        else:
            lines.append(line)
    return "\n".join(lines)


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Calls ``command``, which may parse flags first, and exits.

    Exit status: what it returns (None is 0); 1 with one message on standard error for an
    ``AgenticRingError`` (unless it names another status) or a full disk; 2 for wrong flags; 75 with one line
    after SIGTERM, SIGUSR1 or Ctrl-C, where the same command continues the work; 76 where another process of
    the job was lost; 130 after a second Ctrl-C.
    """
    skip_absent_tpus()
    listener = StopListener()
    try:
        listener.start()
        status = command() or 0
        listener.settled = True
    except BaseException as error:
        listener.settled = True
        message, status = _explained(error)
        if not message:
            if isinstance(error, Exception) and jax.distributed.is_initialized():
                traceback.print_exception(error)
                end_job(1)
            raise
        print(message, file=sys.stderr)
    finally:
        listener.close()
    end_job(status)
    sys.exit(status)


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
