"""Results of rows: the file that keeps them, and the table that is printed.

The file is plain JSON and is read without pydantic, which a machine with only JAX lacks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.terminal.tables import TextTable
from evals.gpu.rows import Found, Row

Status = Literal["done", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What became of a row.

    Attributes:
      status: "done", "failed", or "skipped" where this machine cannot measure it.
      found: the measurement of a row that is done.
      message: why the row failed or was skipped.
      seconds: time that it took.
    """

    status: Status
    found: Found | None = None
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Record:
    """A row with its outcome, and where it was measured.

    Attributes:
      row, settings: see ``Row``.
      status, message, seconds: see ``Outcome``.
      value, unit, low, high, details: see ``Found``; empty unless the row is done.
      goal: the goal in words, or None for none on this hardware.
      met: whether the value reaches it; None without a value or goal.
      origin: see ``agentic_ring.provenance``.
    """

    row: str
    settings: Mapping[str, Any]
    status: Status
    message: str
    seconds: float
    goal: str | None
    met: bool | None
    origin: Mapping[str, Any]
    value: float | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, outcome: Outcome, hardware_name: str | None, origin: Mapping[str, Any]) -> "Record":
        """The record of an outcome on hardware of this name in ``evals.compile.hardware``, if it has one."""
        applies = row.goal is not None and (not row.goal.hardware or hardware_name in row.goal.hardware)
        goal = row.goal if applies else None
        found = outcome.found
        return cls(
            row=row.name,
            settings=dict(row.settings),
            status=outcome.status,
            message=outcome.message,
            seconds=outcome.seconds,
            goal=None if goal is None else str(goal),
            met=None if goal is None or found is None else goal.met(found.value),
            origin=origin,
            **({} if found is None else asdict(found)),
        )

    def measures(self, row: Row) -> bool:
        """Whether the row need not be measured again: it was, with the same settings."""
        return self.status == "done" and self.settings == row.settings


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Writes the records as JSON, atomically; a number that is not finite is written as NaN or Infinity."""
    with replacing(path) as beside:
        beside.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")


def read_records(path: Path) -> list[Record]:
    """Returns the records of a file, none if it does not exist.

    Raises:
      DataError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        records = [Record(**entry) for entry in json.loads(path.read_text())]
        for record in records:
            _check(record)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} holds no rows of this script ({error}); delete it, or give another --output"
        ) from error
    return records


def _check(record: Record) -> None:
    """Raises a ValueError for a field of another type than this script writes."""
    kinds: dict[str, Any] = {"row": str, "message": str, "unit": str, "seconds": int | float}
    kinds |= dict.fromkeys(("settings", "origin", "details"), dict)
    kinds |= dict.fromkeys(("value", "low", "high"), int | float | None)
    kinds |= {"goal": str | None, "met": bool | None}
    for known in fields(record):
        value = getattr(record, known.name)
        if known.name == "status":
            if value not in get_args(Status):
                raise ValueError(f"status is {value!r}")
        elif not isinstance(value, kinds[known.name]):
            raise ValueError(f"{known.name} is {value!r}")
    if record.status == "done" and None in (record.value, record.low, record.high):
        raise ValueError(f"{record.row} is done and has no value")
    record.origin["hardware"]["device_kind"]


def record_table(records: Sequence[Record]) -> TextTable:
    """Returns the table of goal, found and met, with the messages of rows that have no value below it."""
    lines = []
    for record in records:
        found, spread = record.status, ""
        if record.value is not None and record.low is not None and record.high is not None:
            found = f"{record.value:.4g} {record.unit}"
            spread = f"{record.low:.4g} to {record.high:.4g}"
        peer = record.details.get("peer_ratio")
        lines.append(
            {
                "row": record.row,
                "goal": record.goal or "",
                "found": found,
                "min to max": spread,
                "time / peer's": "" if peer is None else f"{peer:.2f}",
                "met": "" if record.met is None else "yes" if record.met else "NO",
            }
        )
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record.message:
            reasons.setdefault(f"{record.status}: {record.message}", []).append(record.row)
    notes = [f"{', '.join(names)} {reason}" for reason, names in reasons.items()]
    commits = dict.fromkeys(str(record.origin["commit"]) for record in records)
    kinds = dict.fromkeys(str(record.origin["hardware"]["device_kind"]) for record in records)
    notes.append(f"measured on {', '.join(kinds)} at commit {', '.join(commits)}")
    return TextTable("A day with a GPU", lines, notes)
