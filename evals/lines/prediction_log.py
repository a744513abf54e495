"""What a model answered, case by case, on disk as soon as it is known."""

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
      key: of the line asked for.
      depth: of that line, in [0, 1).
      expected: the number in it.
      value_duplicates: other lines with that number.
      text: the answer, as it came.
      last: number that the answer is taken for by its last one.
      first: likewise by its first one.
      prompt_tokens: of the whole prompt.
      seconds: that the answer took.
      error: why there is none; it is asked for again when the run goes on.
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
    """A JSON object a line. A later row about a case takes the place of an earlier one.

    Raises:
      DataError: a row that is none. The last one may have been cut short when the run was killed: it is
        dropped, and its case is asked again.
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
                    f"{path}, line {number} is no prediction: {line[:80]!r}; delete it and run the same "
                    "command again, which asks that question again"
                ) from error
            self.rows[row.case] = row

    def add(self, row: Prediction) -> None:
        """Writes a row; it is on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row.case] = row
