"""Measured rows as CSV, each with the command, the commit and the machine that it comes from."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_ring.errors import DataError
from agentic_ring.files import replacing
from agentic_ring.provenance import provenance


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows, which may differ in their columns; where a row lacks one its cell is empty."""
    origin = provenance()
    where = {name: origin[name] for name in ("command", "commit")}
    where |= {name: json.dumps(origin[name]) for name in ("hardware", "versions")}
    columns = dict.fromkeys(name for row in rows for name in row)
    with replacing(path) as beside, beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *where])
        writer.writeheader()
        writer.writerows({**row, **where} for row in rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of ``write_rows``, every cell as text.

    Raises:
      DataError: no such file, or no rows in it.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; measure first, with --rows-to {path}")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise DataError(f"{path} has no rows; measure again, with --rows-to {path}")
    return rows
