"""Writes a sealed HDF5 file: beside its place, by a file that survives a full disk, renamed at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from agentic_ring.data.sealed.failsafe_file import FailsafeFile
from agentic_ring.data.sealed.sealed_file import HEADER_BYTES, FileKind, seal
from agentic_ring.files import replacing


@contextmanager
def sealed_writer(path: Path, kind: FileKind) -> Iterator[tuple[h5py.File, FailsafeFile]]:
    """A new HDF5 file that takes the place of ``path`` once the block ends without an error.

    Yields the file and what it writes to, whose ``check`` tells early of a full disk. Until the last
    byte is on disk nothing changes at ``path``; a failure leaves no file behind.

    Raises:
      OSError: the disk is full.
    """
    with replacing(path) as beside:
        target = FailsafeFile(beside)
        try:
            # "latest" is the format whose metadata carries checksums.
            with h5py.File(target, "w", libver="latest", userblock_size=HEADER_BYTES) as file:
                yield file, target
            target.check()
        finally:
            target.close()
        seal(beside, kind)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
