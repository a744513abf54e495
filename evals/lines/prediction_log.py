"""Log of a model's answers, one row per case, written to disk as soon as each is known."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic

from agentic_ring.errors import DataError


@dataclass(frozen=True)
class Prediction:
    """One case and its answer.

    Attributes:
      case: number of the question, from 0, over all documents of the set.
      document: number of its document.
      key: key of the requested line.
      depth: depth of that line, in [0, 1).
      expected: the number in that line.
      value_duplicates: how many other lines have the same number.
      text: the answer, unchanged.
      last: last number in the answer.
      first: first number in the answer.
      prompt_tokens: tokens of the whole prompt.
      seconds: time for the answer.
      error: why there is no answer, or None; a resumed run asks such a question again.
    """

    case: int
    document: int
    key: str | int
    depth: float
    expected: int
    value_duplicates: int
    text: str
    last: int
    first: int
    prompt_tokens: int
    seconds: float
    error: str | None


_ADAPTER = pydantic.TypeAdapter(Prediction)


class PredictionLog:
    """A file with one JSON object per line. A later row for a case replaces an earlier one.

    Raises:
      DataError: a row is malformed. Only the last row may be incomplete, if the run was killed: it is
        dropped, and its question is asked again.
    """

    def __init__(self, path: Path):
        self._path = path
        self.rows: dict[int, Prediction] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = _ADAPTER.validate_json(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number} is not a prediction: {line[:80]!r}; delete that line and run "
                    "the same command again, which asks the question again"
                ) from error
            self.rows[row.case] = row

    def add(self, row: Prediction) -> None:
        """Appends a row; it is on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row.case] = row
