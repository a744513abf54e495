"""Atomic writing of files: a reader never sees an incomplete one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, which replaces ``path`` once the block ends without an error.

    On an error, such as a full disk, the temporary file is deleted and ``path`` is unchanged. A process that
    is killed may leave ``NAME.PROCESS_ID.partial`` behind, which nothing reads. The folder is created if it
    does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        os.replace(beside, path)
    except OSError as error:
        # The error of a failed write does not name its file.
        error.filename = error.filename or str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)
