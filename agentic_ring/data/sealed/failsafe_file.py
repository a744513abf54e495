"""A file for HDF5 to write to that keeps the first failure to itself until it is asked.

HDF5 cannot stop halfway: after a write that failed, on a full disk say, it tries again whenever it
closes something, and crashes the process at exit. Here the first failure is remembered, everything
after it is dropped, and the writer finds out by ``check``.
"""

from pathlib import Path


class FailsafeFile:
    """A new file with the methods of a Python file object that h5py needs.

    Args:
      path: of the file, which is replaced.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("w+b", buffering=0)
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises the first failure, if there was one.

        Raises:
          OSError: with the file's name.
        """
        if self._error is not None:
            self._error.filename = str(self._path)
            raise self._error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def write(self, data: memoryview) -> int:
        """Writes all of ``data``, or drops it after a failure."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while len(left) and self._error is None:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._error = error
        return size

    def truncate(self, size: int) -> int:
        """Sets the file's size, unless something failed."""
        try:
            if self._error is None:
                self._file.truncate(size)
        except OSError as error:
            self._error = error
        return size

    def read(self, size: int) -> bytes:
        """Reads back what was written; zeros for what was dropped."""
        return self._file.read(size).ljust(size, b"\0")

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves to a place in the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """The place in the file."""
        return self._file.tell()

    def flush(self) -> None:
        """Nothing is held back."""
