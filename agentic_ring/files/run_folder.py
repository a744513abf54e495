"""The folder of a run: its only writer, its configuration, which identifies it, and the seconds of stages."""

import contextlib
import fcntl
import json
import os
import reprlib
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TextIO, TypeVar

from agentic_ring.errors import ConfigError, FolderInUseError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import remove_leftovers
from agentic_ring.files.json_files import Content, read_json, write_json
from agentic_ring.terminal.progress import say

with needs_extra("models"):
    import pydantic


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Settings = TypeVar("Settings", bound=Dataclass)
HARDWARE_FIELDS = frozenset({"mesh", "accumulation"})
"""Settings that follow from the devices: a run may continue with others, and its losses change only by
rounding. ``config.json`` has those of the newest session."""
LOCK_FILE = ".lock"
_Seconds = Annotated[float, pydantic.Field(ge=0)]


@contextmanager
def only_writer(folder: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the only one that writes to ``folder`` during the block; creates the folder.

    With ``wait`` it waits for another writer, with a message. That suits data which several runs share: the
    second finds there what the first has written. The lock is the operating system's: that of a killed
    process stops no one. What killed processes left unfinished in the folder is deleted.

    Raises:
      FolderInUseError: another process writes to it, and ``wait`` is not set.
      OSError: the disk of the folder has no locks.
    """
    path = folder / LOCK_FILE
    file = _locked(path, wait)
    try:
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
        file.truncate(0)
        file.write(json.dumps(holder | {"command": shlex.join(sys.argv)}))
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
        return "process {process} on {host} since {since} ({command})".format(**json.loads(content))
    except (ValueError, KeyError, TypeError):  # it is writing this
        return "a process that has just started"


def write_config(directory: Path, config: Dataclass) -> None:
    """Writes the dataclass as ``config.json``."""
    write_json(directory / "config.json", asdict(config))


def read_config(directory: Path, kind: type[Content]) -> Content:
    """Reads ``config.json`` as an object of this kind; a DataError if it is missing or another one's."""
    remedy = "give the folder of a run, such as runs/NAME, with its own configuration"
    return read_json(directory / "config.json", kind, remedy)


def differing_fields(old: Dataclass, new: Dataclass) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configurations of the same kind differ: both values by dotted name.

    Parts of a tuple of dataclasses are named by number, as stages.0.rate.
    """

    def walk(prefix: str, a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            found = (walk(f"{prefix}.{key}", _by_number(a[key]), _by_number(b[key])) for key in a)
            return {name: values for part in found for name, values in part.items()}
        return {} if a == b else {prefix.removeprefix("."): (a, b)}

    return walk("", asdict(old), asdict(new))


def _by_number(value: Any) -> Any:
    parts = isinstance(value, tuple) and all(isinstance(part, dict) for part in value)
    return dict(enumerate(value)) if parts else value


def check_same_run(directory: Path, config: Dataclass) -> bool:
    """Checks that the folder holds a run with these settings; returns whether it was on other hardware.

    Settings other than ``HARDWARE_FIELDS`` that differ are a ConfigError, which names them.
    """
    changed = differing_fields(read_config(directory, type(config)), config)
    fixed = {name: values for name, values in changed.items() if not HARDWARE_FIELDS & {*name.split(".")}}
    if fixed:
        values = "; ".join(
            f"{name} is {reprlib.repr(there)} there, {reprlib.repr(here)} here"
            for name, (there, here) in fixed.items()
        )
        raise ConfigError(
            f"{directory} holds a run with other settings ({', '.join(fixed)}): {values}. A run may continue "
            "on other devices, with another ring or another number of processes; all other settings stay. "
            "Give the flags with which it was started, or another --output, or move that folder aside and "
            "start anew"
        )
    return bool(changed)


@contextmanager
def enter_directory(directory: Path, config: Dataclass, resume: bool) -> Iterator[None]:
    """Continues the run in the folder, or starts a new one, as its only writer during the block.

    Without ``resume`` an earlier run is moved to NAME.1, NAME.2, ...; nothing is deleted. Raises what
    ``only_writer`` and ``check_same_run`` raise.
    """
    settings = directory / "config.json"
    if not resume and settings.exists():
        with only_writer(directory):
            number = next(n for n in range(1, 10_000) if not Path(f"{directory}.{n}").exists())
            directory.rename(f"{directory}.{number}")
        Path(f"{directory}.{number}", LOCK_FILE).unlink()
        say(f"moved the earlier run to {directory}.{number}")
    with only_writer(directory):
        if not settings.exists():
            write_config(directory, config)
        elif check_same_run(directory, config):
            say("the run continues on other hardware: the same data and batches, losses equal to rounding")
            write_config(directory, config)
        yield


class Stages:
    """Seconds spent in each stage, summed over all sessions of a run once ``keep_in`` names its folder."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._path: Path | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a block, even if an error ends it."""
        say(f"== {name}")
        started = time.monotonic()
        try:
            yield
        finally:
            self._add({name: time.monotonic() - started})

    def keep_in(self, directory: Path) -> None:
        """Keeps the seconds in ``stages.json`` from now on, added to those of earlier sessions."""
        self._path, remedy = directory / "stages.json", "delete it to count the seconds anew"
        self._add(read_json(self._path, dict[str, _Seconds], remedy) if self._path.exists() else {})

    def _add(self, seconds: dict[str, float]) -> None:
        for name, more in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + more
        if self._path is not None:
            write_json(self._path, self.seconds)
