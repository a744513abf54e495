"""Sealed HDF5 files: any damage is detected, and a full disk neither crashes HDF5 nor harms the old file.

HDF5 leaves room for the user before its own first byte (the "user block"). ``write_sealed`` puts one line
of JSON there, padded with zeros, with the format's name and version and the file's size and digest. Then

    another format or version    is detected before HDF5 reads a byte
    a truncated file             is detected by its size when it is opened
    a flipped byte anywhere      is detected by ``verify``, in data, metadata or the header itself

HDF5's own checksums (fletcher32) detect damaged data as it is read, but they cover neither unused bytes nor
a file that ends early.

Why not a plain file and a digest in a second file: two files cannot be renamed at once, so a crash between
the renames would leave a store that its digest refuses. ``_FailsafeFile`` is needed as well: HDF5 2.0 still
ends the process with a segmentation fault if a write fails on a full disk.
"""

import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from agentic_ring.errors import StoreError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import remove_dead_leftovers, replacing
from agentic_ring.stopping import uninterrupted

with needs_extra("models"):
    import h5py

HEADER_BYTES = 512
_READ_BYTES = 1 << 22
_FIELDS = {"format": str, "version": int, "bytes": int, "blake2b": str}


@dataclass(frozen=True)
class FileKind:
    """A kind of sealed file, and how a user obtains one.

    Attributes:
      version: version of the format; a reader accepts only its own.
      noun: what messages call such a file.
      command: command that writes one.
      rewrite: what to do about a damaged or outdated file.
    """

    name: str
    version: int
    noun: str
    command: str
    rewrite: str


class SealedReader(ABC):
    """Read access to a sealed file of one kind; a context manager."""

    kind: ClassVar[FileKind]

    def __init__(self, path: Path):
        """Use ``open``."""
        self.path = path
        self._header = _read_header(path, self.kind)
        try:
            self._file = h5py.File(path, "r")
            self._read_tables()
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise StoreError(f"{path} cannot be read ({error}); delete it and {self.kind.rewrite}") from error

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a file for reading and checks its version, size, arrays and shapes.

        Raises:
          StoreError: the file is missing, truncated, of another version, or lacks an array.
        """
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
        """Reads the whole file and compares it with the digest in its header.

        Raises:
          StoreError: a byte differs from what was written.
        """
        if _digest(self.path) != self._header["blake2b"]:
            raise StoreError(
                f"{self.path}: the digest does not match, so some byte has changed; delete it and "
                f"{self.kind.rewrite}"
            )


@contextmanager
def write_sealed(path: Path, kind: FileKind) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Yields a new HDF5 file that replaces ``path`` once the block ends without an error.

    The second value yielded is a function that raises the OSError of a failed write, such as on a full disk;
    call it from time to time to stop early. On failure ``path`` is unchanged and no other file is left.

    Raises:
      OSError: a write failed.
    """
    remove_dead_leftovers(path)
    with replacing(path) as beside:
        with _FailsafeFile(beside) as target:
            # "latest" is the format whose metadata carries checksums.
            with h5py.File(target, "w", libver="latest", userblock_size=HEADER_BYTES) as file:
                yield file, target.check
            target.check()
        seal(beside, kind)
        with beside.open("rb") as file:
            os.fsync(file.fileno())


class _FailsafeFile(io.FileIO):
    """A new file for HDF5 to write to, which remembers the first failed write and drops all later ones.

    After a failed write HDF5 tries again whenever it closes something, and crashes the process at exit. So
    every write seems to succeed here, and ``check`` tells the writer of the failure. Requests to stop wait
    until HDF5 has returned, for an exception is a failed write too.
    """

    def __init__(self, path: Path):
        super().__init__(path, "w+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises the first failure, if there was one, with the file's name."""
        if self._error is not None:
            self._error.filename = str(self.name)
            raise self._error

    @uninterrupted
    def write(self, data: Any, /) -> int:
        """Writes all of ``data``, or drops it after a failure."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while len(left) and self._error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self._error = error
        return size

    @uninterrupted
    def truncate(self, size: int | None = None, /) -> int:
        """Sets the file's size, unless a write failed."""
        try:
            if self._error is None:
                return super().truncate(size)
        except OSError as error:
            self._error = error
        return size or 0

    @uninterrupted
    def readinto(self, buffer: Any, /) -> int:
        """Reads back what was written, and zeros for what was dropped."""
        view = memoryview(buffer).cast("B")
        count = super().readinto(view) or 0
        view[count:] = bytes(len(view) - count)
        return len(view)


def seal(path: Path, kind: FileKind) -> None:
    """Writes the header of a finished file whose user block has ``HEADER_BYTES``."""
    size = path.stat().st_size
    header = {"format": kind.name, "version": kind.version, "bytes": size, "blake2b": _digest(path)}
    line = json.dumps(header).encode() + b"\n"
    with path.open("r+b") as file:
        file.write(line.ljust(HEADER_BYTES, b"\0"))


def _read_header(path: Path, kind: FileKind) -> dict[str, Any]:
    """The header; a StoreError if the file is missing, foreign, outdated, truncated or damaged there."""
    try:
        with path.open("rb") as file:
            block = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except FileNotFoundError:
        raise StoreError(f"there is no {kind.noun} at {path}; write one with `{kind.command}`") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}); {kind.rewrite}") from error
    line, _, padding = block.partition(b"\n")
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    remedy = f"delete it and {kind.rewrite}"
    if not isinstance(header, dict) or header.get("format") != kind.name:
        raise StoreError(f"{path} is not an {kind.name} (or its first bytes are damaged); {remedy}")
    if {name: type(value) for name, value in header.items()} != _FIELDS or padding.strip(b"\0"):
        raise StoreError(f"{path}: the header is damaged; {remedy}")
    if header["version"] != kind.version:
        raise StoreError(
            f"{path} has version {header['version']} of the {kind.name}, this program reads version "
            f"{kind.version}; {kind.rewrite}, or use the release that wrote it"
        )
    if header["bytes"] != size:
        expected = f"expected {header['bytes']:,}"
        raise StoreError(f"{path} holds {size:,} bytes, {expected}: it is truncated; {remedy}")
    return header


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
