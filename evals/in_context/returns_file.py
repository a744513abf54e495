"""One file with the returns of all arms in every case, from which a report draws its curves."""

from pathlib import Path
from typing import Any, cast

import numpy as np

from agentic_ring.data.families import Region
from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz
from evals.in_context.verdict import Case, Returns

FILE_NAME = "returns.npz"
_MOST_BYTES = 1 << 30


def write_returns(path: Path, returns: Returns) -> None:
    """Writes returns float64 [seeds, tasks, trials] of every case, atomically."""
    with replacing(path) as beside, beside.open("wb") as file:
        arrays: dict[str, Any] = {" ".join(map(str, case)): found for case, found in returns.items()}
        np.savez(file, **arrays)


def read_returns(path: Path) -> Returns:
    """Reads what ``write_returns`` wrote.

    Raises:
      DataError: the file is missing or damaged.
    """
    remedy = "run the experiment's command again: it writes the file from the arms that are there"
    try:
        arrays = read_npz(path, _MOST_BYTES)
        return {_case(name): _checked(name, found) for name, found in arrays.items()}
    except (DataError, ValueError) as error:
        raise DataError(f"{path}: {error}; {remedy}") from error


def _case(name: str) -> Case:
    arm, cues, condition, region = name.split(" ")
    return Case(arm, int(cues), condition, cast(Region, region))


def _checked(name: str, found: np.ndarray) -> np.ndarray:
    if found.dtype != np.float64 or found.ndim != 3 or not found.size or not np.isfinite(found).all():
        raise ValueError(
            f"{name!r} is {found.dtype} {list(found.shape)}; expected finite float64 [seeds, tasks, trials]"
        )
    return found
