"""What all readers of sealed HDF5 files (``sealed_file.py``) share: opening, checking, closing."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import h5py

from agentic_ring.data.sealed.sealed_file import FileKind, check_seal, verify_seal
from agentic_ring.errors import StoreError


class SealedReader(ABC):
    """Read access to a file of one kind; a context manager."""

    kind: ClassVar[FileKind]

    def __init__(self, path: Path):
        """Use ``open``."""
        self.path = path
        self._header = check_seal(path, self.kind)
        try:
            self._file = h5py.File(path, "r")
            self._read_tables()
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise StoreError(f"{path} cannot be read ({error}); delete it and {self.kind.rewrite}") from error

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a file for reading and checks its version, size, arrays and shapes.

        Raises:
          StoreError: the file is missing, cut short, of another version, or lacks an array.
        """
        return cls(Path(path))

    @abstractmethod
    def _read_tables(self) -> None:
        """Reads what is small of ``_file``; raises KeyError, OSError or ValueError where it is not right."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the file for itself: HDF5 handles cannot be shared."""
        return type(self), (self.path,)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def verify(self) -> None:
        """Reads every byte.

        Raises:
          StoreError: something differs from what was written.
        """
        verify_seal(self.path, self.kind, self._header)
