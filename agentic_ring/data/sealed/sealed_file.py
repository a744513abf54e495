"""A header in front of an HDF5 file that makes any damage to the file detectable.

HDF5 leaves room for the user before its own first byte (the "user block"). The block holds one line
of JSON, padded with zeros, with the format's name and version and the size and digest of the whole
file, so that

    another format or version    is seen before HDF5 reads a byte
    a truncated file             is seen on opening, by its size
    a flipped byte anywhere      is seen by ``verify_seal``, in data, metadata or the header itself

HDF5's own checksums (fletcher32) see damaged data as it is read, but they cover neither the unused
bytes nor every change, and they cannot tell that a file ends early.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_ring.errors import StoreError

HEADER_BYTES = 512
_READ_BYTES = 1 << 22
_FIELDS = {"format": str, "version": int, "bytes": int, "blake2b": str}


@dataclass(frozen=True)
class FileKind:
    """What a sealed file is, and how a user gets a good one.

    Attributes:
      name: of the format.
      version: of the format; a reader takes its own alone.
      noun: what messages call such a file.
      command: writes one.
      rewrite: what to do about a file that is damaged or old.
    """

    name: str
    version: int
    noun: str
    command: str
    rewrite: str


def seal(path: Path, kind: FileKind) -> None:
    """Writes the header of a finished file whose user block has ``HEADER_BYTES``."""
    size = path.stat().st_size
    header = {"format": kind.name, "version": kind.version, "bytes": size, "blake2b": _digest(path)}
    line = json.dumps(header).encode() + b"\n"
    with path.open("r+b") as file:
        file.write(line.ljust(HEADER_BYTES, b"\0"))


def check_seal(path: Path, kind: FileKind) -> dict[str, Any]:
    """Checks format, version and size, without reading the data; returns the header.

    Raises:
      StoreError: the file is missing, of another format or version, truncated, or its header damaged.
    """
    try:
        with path.open("rb") as file:
            block = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except FileNotFoundError:
        raise StoreError(f"there is no {kind.noun} at {path}; write one with `{kind.command}`") from None
    line, _, padding = block.partition(b"\n")
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    mend = f"delete it and {kind.rewrite}"
    if not isinstance(header, dict) or header.get("format") != kind.name:
        raise StoreError(f"{path} is no {kind.name} (or its first bytes are damaged); {mend}")
    if {name: type(value) for name, value in header.items()} != _FIELDS or padding.strip(b"\0"):
        raise StoreError(f"{path}: the header is damaged; {mend}")
    if header["version"] != kind.version:
        raise StoreError(
            f"{path} has version {header['version']} of the {kind.name}, this program reads version "
            f"{kind.version}; {kind.rewrite}, or use the release that wrote it"
        )
    if header["bytes"] != size:
        expected = f"expected {header['bytes']:,}"
        raise StoreError(f"{path} holds {size:,} bytes, {expected}: it was cut short; {mend}")
    return header


def verify_seal(path: Path, kind: FileKind, header: dict[str, Any]) -> None:
    """Reads the whole file and compares it with the digest in its header.

    Raises:
      StoreError: a byte differs from what was written.
    """
    if _digest(path) != header["blake2b"]:
        raise StoreError(
            f"{path}: the digest does not match, so some byte has changed; delete it and {kind.rewrite}"
        )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
