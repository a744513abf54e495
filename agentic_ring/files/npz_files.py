"""Reading of NumPy's ``.npz`` archives that may be damaged or made to harm.

``np.load`` parses an array's header before the member's CRC is compared, and reserves the memory that the
header asks for. Here a member is read whole, its size bounded and its CRC compared, before it is parsed.
"""

import io
import zipfile
from pathlib import Path

import numpy as np

from agentic_ring.errors import DataError

_HEADER_BYTES = 4096
"""Limit for the header of one array; NumPy's own for arrays of one dtype have 128 bytes."""
_MEMBERS = 4096


def read_npz(path: Path, most_bytes: int) -> dict[str, np.ndarray]:
    """Returns the arrays of an archive by name.

    Memory stays within a few times of ``most_bytes``, the limit for all arrays together.

    Raises:
      DataError: the file is missing, damaged or encrypted, holds pickled objects, or is larger; the message
        gives the reason only, to which the caller adds file and remedy.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if len(members) > _MEMBERS or size > most_bytes + len(members) * _HEADER_BYTES:
                raise ValueError(f"it has {len(members)} members of {size:,} bytes, not {most_bytes:,}")
            arrays = {member.filename: _array(archive, member) for member in members}
            if len(arrays) < len(members) or not all(name.endswith(".npy") for name in arrays):
                raise ValueError(f"its members are {[member.filename for member in members]}")
            return {name.removesuffix(".npy"): array for name, array in arrays.items()}
    except Exception as error:  # zipfile raises many types for a damaged archive
        raise DataError(f"it is not a readable .npz without pickles ({error})") from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its member {member.filename!r} is neither stored nor deflated")
    with archive.open(member) as file:
        # No more is unpacked than was declared, and the end compares the CRC.
        content = file.read(member.file_size)
    stream = io.BytesIO(content)
    try:
        array = np.lib.format.read_array(stream, allow_pickle=False, max_header_size=_HEADER_BYTES)
    # The header is a Python literal, whose parser raises anything from SyntaxError to MemoryError.
    except Exception as error:
        raise ValueError(f"{member.filename} has no array without pickles: {error}") from None
    if len(content) != member.file_size or stream.read(1):
        raise ValueError(f"{member.filename} has {len(content):,} bytes, which are not one array")
    return np.asarray(array, order="C")
