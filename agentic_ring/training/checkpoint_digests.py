"""Digests of a checkpoint's files, in the format of ``sha256sum``, whose ``-c`` checks them too."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentic_ring.errors import CheckpointError
from agentic_ring.files.atomic import flush

FILE_NAME = "SHA256SUMS"
_THREADS = min(16, os.cpu_count() or 1)


def write_digests(folder: Path) -> None:
    """Writes the digest of every file in ``folder``, and waits until all of them are on the disk."""
    names = _files(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name), names)
        lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
        (folder / FILE_NAME).write_text("".join(lines))
        list(pool.map(lambda name: flush(folder / name), [FILE_NAME, *names]))
    flush(folder)


def listed_digests(folder: Path) -> dict[str, str]:
    """The digest of each file of a checkpoint, by its name.

    Raises:
      CheckpointError: a file has no digest, is missing, or the digests cannot be read; names the file.
    """
    path = folder / FILE_NAME
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: the file was deleted, or the checkpoint is of release 0.2.0 or older, "
            "which wrote no digests. Put it back, continue with that release, or start a new run"
        ) from error
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    present = _files(folder)
    for name in sorted({*digests} ^ {*present}):
        if name in digests:
            raise _damaged(folder / name, f"it is missing, but {FILE_NAME} lists it")
        raise _damaged(folder / name, f"{FILE_NAME} does not list it")
    return digests


def check_digests(folder: Path, digests: dict[str, str], names: Sequence[str]) -> None:
    """Reads these files of a checkpoint and compares them with their digests.

    Raises:
      CheckpointError: a byte differs from what was written; names the file.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, found in zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True):
            if found != digests[name]:
                raise _damaged(folder / name, f"its digest is not the one in {FILE_NAME}")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {reason}. Put back the checkpoint {path} is part of, or start a new run"
    )


def _files(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(name for path in files if (name := str(path.relative_to(folder))) != FILE_NAME)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error
