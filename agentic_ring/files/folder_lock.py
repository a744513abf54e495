"""One writer per folder: an operating system's lock on a file in it, whose content names the holder."""

import contextlib
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from agentic_ring.errors import FolderInUseError
from agentic_ring.files.atomic import remove_leftovers
from agentic_ring.terminal.progress import say

LOCK_FILE = ".lock"


@contextmanager
def only_writer(folder: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the only one that writes to ``folder`` during the block; creates the folder.

    With ``wait`` it waits for another writer, with a message. That suits data which several runs share: the
    second finds there what the first has written.

    The system frees the lock when the process ends, however it ends, so the file of a killed process stops no
    one. What killed processes left unfinished in the folder is deleted: all their ``*.partial``.

    Raises:
      FolderInUseError: another process writes to it, and ``wait`` is not set; says which one, since when and
        with which command.
      OSError: the disk of the folder has no locks.
    """
    path = folder / LOCK_FILE
    file = _locked(path, wait)
    try:
        holder = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": datetime.now().astimezone().isoformat(" ", "seconds"),
            "command": shlex.join(sys.argv),
        }
        file.truncate(0)
        file.write(json.dumps(holder))
        file.flush()
        remove_leftovers(folder)
        yield
    finally:
        if _is_still(path, file):
            path.unlink()
        file.close()


def _locked(path: Path, wait: bool) -> TextIO:
    told = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            who = _holder(file.read())
            file.close()
            if not wait:
                raise FolderInUseError(
                    f"{path.parent} is in use by {who}. Two writers would damage each other's files: wait "
                    "until that one has ended, stop it, or give another --output"
                ) from error
            if not told:
                say(f"waiting until {path.parent} is free; it is in use by {who}")
                told = True
            time.sleep(1)
            continue
        except OSError as error:
            error.filename = str(path)
            raise
        # The holder before may have deleted the file, or moved its folder, since it was opened.
        if _is_still(path, file):
            return file
        file.close()


def _is_still(path: Path, file: TextIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _holder(content: str) -> str:
    try:
        holder = json.loads(content)
        return (
            f"process {holder['process']} on {holder['host']} since {holder['since']} ({holder['command']})"
        )
    except (ValueError, KeyError, TypeError):  # it is writing this
        return "a process that has just started"
