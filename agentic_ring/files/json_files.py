"""JSON files with typed contents: a damaged or foreign one is a ``DataError`` with one message.

Types are strict: "2" is no number, 1 no boolean, and NaN is refused. A byte order mark, which some editors
write, is left out. Files and rows that this program writes carry a ``digest`` of their other fields, so that
a changed value is found as well. A user who edits such a file removes its digest.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.files.read_errors import remedy_for

with needs_extra("models"):
    import pydantic

Content = TypeVar("Content")
_DIGEST = "digest"


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes an object with its digest, atomically; a number that is not finite is a ValueError."""
    text = json.dumps({**fields, _DIGEST: _digest(fields)}, indent=2)
    with replacing(path) as beside:
        beside.write_text(text + "\n", encoding="utf-8")


def json_row(fields: Mapping[str, Any]) -> str:
    """Returns an object with its digest as one line of a jsonl file."""
    return json.dumps({**fields, _DIGEST: _digest(fields)}) + "\n"


def read_json(path: Path, kind: type[Content], remedy: str, foreign: bool = False) -> Content:
    """Reads a JSON file as an instance of ``kind``: a dataclass, a model of pydantic or a typed container.

    ``remedy`` says what to do about a bad file. Where a file is ``foreign``, written by other programs too,
    ``kind`` says what becomes of other fields.

    Raises:
      DataError: the file cannot be read, is not JSON, was changed, or has missing, wrong or unknown fields.
    """
    try:
        return parse_json(path.read_bytes(), kind, foreign)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} {json_fault(error)}; {remedy_for(error, remedy)}") from error


def read_json_rows(path: Path, kind: type[Content], remedy: str) -> list[Content]:
    """Reads a jsonl file, see ``read_json``; a last line that is incomplete, as after a kill, is dropped."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} {json_fault(error)}; {remedy_for(error, remedy)}") from error
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            rows.append(parse_json(line, kind))
        except ValueError as error:
            raise DataError(f"{path}, line {number} {json_fault(error)}: {line[:80]!r}; {remedy}") from error
    return rows


def parse_json(content: bytes, kind: type[Content], foreign: bool = False) -> Content:
    """Decodes a file or row, see ``read_json``; ``json_fault`` explains the ValueError of a bad one."""
    try:
        decoded = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if isinstance(decoded, dict) and _DIGEST in decoded:
        found = decoded.pop(_DIGEST)
        if found != _digest(decoded):
            raise ValueError("was changed after it was written: its digest does not match")
    text = json.dumps(decoded, allow_nan=False)
    # With None the type itself says what becomes of other fields.
    return _adapter(kind).validate_json(text, strict=True, extra=None if foreign else "forbid")


def json_fault(error: Exception) -> str:
    """Returns a clause that says what is wrong with a file, for a message that begins with its name."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "does not exist"
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror})"
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "its content"
        is_missing = first["type"] == "missing"
        return f"has no {place}" if is_missing else f"has {place} = {first['input']!r:.80}: {first['msg']}"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 ({error.reason} at byte {error.start})"
    return f"is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"has {name!r} twice")
        fields[name] = value
    return fields


@cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
