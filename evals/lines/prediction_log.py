"""Log of a model's answers, one row per case, written to disk as soon as each is known."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

import pydantic

from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, read_json_rows

_Count = Annotated[int, pydantic.Field(ge=0)]


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
      prompt_digest: ``prompt_digest`` of the case, which tells it from the cases of other sets.
      error: why there is no answer, or None; a resumed run asks such a question again.
      unfinished: why the answer stops before its end, or None.
      answer_tokens: tokens of the answer, with those of reasoning; None if they are not known.
      cached_tokens: tokens of the prompt that a server had read before; None if it does not say.
      reading_seconds: time to read the document before this question; None if it is not known apart.
      word_partners: how many other lines share a word with the key; None if keys are not pairs of words.
    """

    case: _Count
    document: _Count
    key: str | int
    depth: Annotated[float, pydantic.Field(ge=0, lt=1)]
    expected: int
    value_duplicates: _Count
    text: str
    last: int
    first: int
    prompt_tokens: _Count
    seconds: Annotated[float, pydantic.Field(ge=0)]
    prompt_digest: str
    error: str | None
    unfinished: str | None = None
    answer_tokens: _Count | None = None
    cached_tokens: _Count | None = None
    reading_seconds: Annotated[float, pydantic.Field(ge=0)] | None = None
    word_partners: _Count | None = None


def prompt_digest(document: str, question: str) -> str:
    """Returns a digest of a whole prompt."""
    return hashlib.blake2b((document + question).encode(), digest_size=8).hexdigest()


class Row(Protocol):
    """A dataclass with a case and its answer, as ``Prediction``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def case(self) -> int:
        """Number of the question."""
        ...

    @property
    def prompt_digest(self) -> str:
        """``prompt_digest`` of its prompt."""
        ...

    @property
    def error(self) -> str | None:
        """Why there is no answer, or None."""
        ...

    @property
    def unfinished(self) -> str | None:
        """Why the answer stops before its end, or None."""
        ...


RowT = TypeVar("RowT", bound=Row)


class PredictionLog(Generic[RowT]):
    """A file with one JSON object per line. A later row for a case replaces an earlier one.

    Args:
      path: the file.
      prompts: ``prompt_digest`` of each case of the set.
      kind: dataclass of its rows.

    Raises:
      DataError: a row is malformed, or belongs to another set of cases. Only the last row may be incomplete,
        if the run was killed: it is dropped, and its question is asked again.
    """

    def __init__(self, path: Path, prompts: Sequence[str], kind: type[RowT]):
        self._path = path
        self.rows: dict[int, RowT] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        remedy = "delete that line and run the same command again, which asks the question again"
        for number, row in enumerate(read_json_rows(path, kind, remedy), start=1):
            if row.case >= len(prompts) or row.prompt_digest != prompts[row.case]:
                raise DataError(
                    f"{path}, line {number} answers another question than case {row.case} of this set; "
                    "give another --output, or delete the file to ask again"
                )
            self.rows[row.case] = row
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def add(self, row: RowT) -> None:
        """Appends a row; it is on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_row(asdict(row)))
            file.flush()
            os.fsync(file.fileno())
        self.rows[row.case] = row
