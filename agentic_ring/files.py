"""Writing files so that a reader never meets half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write to, which becomes ``path`` once the block ends without an error.

    On an error, a full disk among them, what was written is deleted and ``path`` stays as it was. A
    process that is killed may leave ``NAME.PROCESS_ID.partial`` behind, which nothing reads. The
    folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        os.replace(beside, path)
    except OSError as error:
        # A failed write does not know its file; the message for the user should.
        error.filename = error.filename or str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)
