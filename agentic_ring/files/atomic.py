"""Atomic writing of files and folders: a reader never sees an incomplete one."""

import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LEFTOVER = re.compile(r"(\.old)?\.(?P<process>\d+)\.partial$")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, which replaces ``path`` once the block ends without an error.

    On an error ``path`` is unchanged. A process that is killed may leave ``NAME.PROCESS_ID.partial`` behind,
    which nothing reads; ``remove_leftovers`` deletes it. The folder is created if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    try:
        yield beside
        os.replace(beside, path)
    except OSError as error:
        # The error of a failed write does not name its file.
        error.filename = error.filename or str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path, obsolete: str = "") -> Iterator[Path]:
    """Yields a new folder beside ``path``, which takes its place once the block ends without an error.

    For several files that belong together: all of them are in ``path``, or none. Files of an earlier folder
    that the block did not write are kept, unless their name matches ``obsolete``, a regular expression.

    No system call exchanges two folders everywhere, so the earlier one is first renamed: a process killed
    between the two renames leaves no folder at ``path``, never a mixture. On an error ``path`` is unchanged;
    leftovers are as in ``replacing``. All files are on the disk before the folder gets its name.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, old = _beside(path), _beside(path.with_name(f"{path.name}.old"))
    remove_dead_leftovers(path)
    try:
        beside.mkdir()
        yield beside
        for kept in path.iterdir() if path.exists() else ():
            if (beside / kept.name).exists() or re.fullmatch(obsolete, kept.name):
                continue
            if kept.is_dir():
                shutil.copytree(kept, beside / kept.name, copy_function=_link)
            else:
                _link(kept, beside / kept.name)
        for written in (*beside.rglob("*"), beside):
            flush(written)
        if path.exists():
            path.rename(old)
        beside.rename(path)
        flush(path.parent)
    except OSError as error:
        error.filename = str(error.filename or path).replace(str(beside), str(path))
        raise
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_dead_leftovers(path: Path) -> None:
    """Deletes what killed processes of this machine, or this process, left beside ``path``."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*"):
        match = _LEFTOVER.fullmatch(leftover.name.removeprefix(path.name))
        if match and not _runs_elsewhere(int(match["process"])):
            _remove(leftover)


def _runs_elsewhere(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it runs, for another user
        return True
    return process != os.getpid()


def remove_leftovers(folder: Path) -> None:
    """Deletes what killed processes left in ``folder`` and below; call it where no other process writes."""
    for path in sorted(folder.rglob("*.partial")):
        if _LEFTOVER.search(path.name):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def _link(source: Path | str, target: Path | str) -> None:
    """Gives a file a second name; copies it where the disk has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
