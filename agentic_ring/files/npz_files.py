"""Reading of NumPy's ``.npz`` archives that may be damaged or made to harm.

NumPy parses an array's header before the member's CRC is compared, and reserves the memory that the header
asks for: a flipped bit shifts every value, or takes gigabytes. Here a member is read whole, its size bounded
and its CRC compared, before any byte of it is interpreted.
"""

import io
import math
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from agentic_ring.errors import DataError

_HEADER_BYTES = 4096
"""Limit for the header of one array; NumPy's own for arrays of one dtype have 128 bytes."""
_MEMBERS = 4096
_ENTRY_BYTES = 512
"""Limit for what an archive needs per member beside its data: names, sizes, dates."""
_ENCRYPTED = 1


def read_npz(path: Path, most_bytes: int) -> dict[str, np.ndarray]:
    """Returns the arrays of an archive by name.

    Args:
      most_bytes: limit for the bytes of all arrays together; memory stays within a few times of it.

    Raises:
      DataError: the file is missing, damaged or encrypted, holds pickled objects, or is larger; the message
        gives the reason only, to which the caller adds file and remedy.
    """
    try:
        with path.open("rb") as file:
            limit = most_bytes + most_bytes // 1000 + _MEMBERS * (_HEADER_BYTES + _ENTRY_BYTES)
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"its arrays may take {most_bytes:,} bytes, but it has more than {limit:,}")
        if content.startswith(np.lib.format.MAGIC_PREFIX):
            raise ValueError("it holds a bare array, expected an archive of several")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            _check_members(members, most_bytes)
            return {
                member.filename.removesuffix(".npy"): _array(member.filename, _bytes(archive, member))
                for member in members
            }
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        RuntimeError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(f"it is not a readable .npz without pickles ({error})") from error


def _check_members(members: list[zipfile.ZipInfo], most_bytes: int) -> None:
    names = [member.filename for member in members]
    if len(names) > _MEMBERS or len(set(names)) < len(names):
        raise ValueError(f"it has {len(names)} members, expected at most {_MEMBERS} of different names")
    for member in members:
        if not member.filename.endswith(".npy"):
            raise ValueError(f"it has a member {member.filename!r}, expected arrays only")
        if member.flag_bits & _ENCRYPTED:
            raise ValueError(f"its member {member.filename!r} is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"its member {member.filename!r} is neither stored nor deflated")
    size, limit = sum(member.file_size for member in members), most_bytes + len(members) * _HEADER_BYTES
    if size > limit:
        raise ValueError(f"it unpacks to {size:,} bytes, expected at most {limit:,}")


def _bytes(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive.open(member) as file:
        # With a size, no more is unpacked than was declared; the last byte makes zipfile compare the CRC.
        content = file.read(member.file_size)
    if len(content) != member.file_size:
        raise EOFError(f"its member {member.filename!r} ends early")
    return content


def _array(name: str, content: bytes) -> np.ndarray:
    """The array of a whole ``.npy`` file."""
    stream = io.BytesIO(content)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("another version than 1.0")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=_HEADER_BYTES)
    # The header is a Python literal, whose parser raises anything from SyntaxError to MemoryError.
    except Exception as error:
        raise ValueError(f"{name} has no header of an array: {error}") from None
    data = memoryview(content)[stream.tell() :]
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{name} has dtype {dtype}, expected numbers or text")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{name} has {len(data):,} bytes, which are not {dtype} {list(shape)}")
    return np.ndarray(shape, dtype, data, order="F" if by_columns else "C").copy(order="C")
