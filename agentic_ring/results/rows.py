"""CSV files of measured rows; each row has the command, commit and hardware that produced it."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.provenance import provenance


def origin_columns(origin: Mapping[str, Any]) -> dict[str, str | None]:
    """The columns that say what produced a row, from ``provenance`` or the fields of a ``Results``."""
    columns = {name: origin[name] for name in ("command", "commit")}
    return columns | {name: json.dumps(origin[name]) for name in ("hardware", "versions")}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows; those without ``origin_columns`` of their own are of this process, missing cells empty."""
    here = origin_columns(provenance())
    columns = dict.fromkeys(name for row in rows for name in row if name not in here)
    with replacing(path) as beside, beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *here])
        writer.writeheader()
        writer.writerows({**here, **row} for row in rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of ``write_rows``, every cell as text; a ``DataError`` if there is no such file or no rows."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
        if not rows or any(None in row or None in row.values() for row in rows):
            raise ValueError("it has no rows of equal length")
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path} is no table ({error}); measure again, with --rows-to {path}") from error
    return rows
