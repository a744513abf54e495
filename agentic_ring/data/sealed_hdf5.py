"""Sealed HDF5 files: one that was damaged, cut or written by another version is refused.

HDF5 leaves room for the user before its own first byte (the "user block"). ``write_sealed`` puts one line
of JSON there, padded with zeros: the format's name and version, and the file's size and digest. They stand
in the file itself, as two files cannot be renamed at once. A file is detected as

    of another format or version    before HDF5 reads a byte
    cut                             by its size, when it is opened
    changed in any byte             by ``verify``
"""

import errno
import hashlib
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from agentic_ring.errors import StoreError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import flush, remove_dead_leftovers, replacing
from agentic_ring.files.read_errors import remedy_for

with needs_extra("models"):
    import h5py

HEADER_BYTES = 512
_SPARE_BYTES = 64 << 20
"""HDF5 keeps up to 8 MiB of each array in memory until the file is closed."""
_FIELDS = {"format": str, "version": int, "bytes": int, "blake2b": str}


@dataclass(frozen=True)
class FileKind:
    """A kind of sealed file, and how a user obtains one."""

    name: str
    version: int
    """Version of the format; a reader accepts only its own."""
    noun: str
    """What messages call such a file."""
    command: str
    """Command that writes one."""
    rewrite: str
    """What to do about a damaged or outdated file."""


class SealedReader(ABC):
    """Read access to a sealed file of one kind; a context manager."""

    kind: ClassVar[FileKind]

    def __init__(self, path: Path):
        self.path = path
        self._header = _read_header(path, self.kind)
        try:
            self._file = h5py.File(path, "r")
            self._read_tables()
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            remedy = remedy_for(error, f"if it is damaged, {self.kind.rewrite}")
            raise StoreError(f"{path} cannot be read ({error}); {remedy}") from error

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a file for reading and checks its version, size, arrays and shapes; else a StoreError."""
        return cls(Path(path))

    @abstractmethod
    def _read_tables(self) -> None:
        """Reads the small arrays of ``_file``; raises KeyError, OSError or ValueError if one is wrong."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the file again: HDF5 handles cannot be shared."""
        return type(self), (self.path,)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def verify(self) -> None:
        """Reads the whole file and compares it with the digest in its header; else a StoreError."""
        if _digest(self.path) != self._header["blake2b"]:
            changed = "the digest does not match, so some byte has changed"
            raise StoreError(f"{self.path}: {changed}; {self.kind.rewrite}")


@contextmanager
def write_sealed(path: Path, kind: FileKind) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Yields a new HDF5 file that replaces ``path`` once the block ends without an error.

    The second value yielded is a function that raises an OSError where the disk is nearly full; call it
    between parts of at most a few MiB, for HDF5 may crash the process where a write fails. On an error
    ``path`` is unchanged and no other file is left.
    """
    remove_dead_leftovers(path)
    with replacing(path) as beside:

        def check() -> None:
            if shutil.disk_usage(beside.parent).free < _SPARE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        check()
        try:
            # "latest" is the format whose metadata carries checksums.
            with h5py.File(beside, "w", libver="latest", userblock_size=HEADER_BYTES) as file:
                yield file, check
        except (OSError, RuntimeError) as error:  # HDF5 tells of a failed write by either
            if number := re.search(r"errno = (\d+)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
            raise
        seal(beside, kind)
        flush(beside)


def seal(path: Path, kind: FileKind) -> None:
    """Writes the header of a finished file whose user block has ``HEADER_BYTES``."""
    size = path.stat().st_size
    header = {"format": kind.name, "version": kind.version, "bytes": size, "blake2b": _digest(path)}
    line = json.dumps(header).encode() + b"\n"
    with path.open("r+b") as file:
        file.write(line.ljust(HEADER_BYTES, b"\0"))


def _read_header(path: Path, kind: FileKind) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            line, _, padding = file.read(HEADER_BYTES).partition(b"\n")
        size = path.stat().st_size
    except FileNotFoundError:
        raise StoreError(f"there is no {kind.noun} at {path}; write one with `{kind.command}`") from None
    except OSError as error:
        remedy = remedy_for(error, kind.rewrite)
        raise StoreError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    remedy = kind.rewrite
    if not isinstance(header, dict) or header.get("format") != kind.name:
        fault = f" is not an {kind.name} (or its first bytes are damaged)"
    elif {name: type(value) for name, value in header.items()} != _FIELDS or padding.strip(b"\0"):
        fault = ": the header is damaged"
    elif header["version"] != kind.version:
        fault = (
            f" has version {header['version']} of the {kind.name}, this program reads version {kind.version}"
        )
        remedy += ", or use the release that wrote it"
    elif header["bytes"] != size:
        fault = f" holds {size:,} bytes, expected {header['bytes']:,}: it is truncated"
    else:
        return header
    raise StoreError(f"{path}{fault}; {remedy}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()  # pyright: ignore
