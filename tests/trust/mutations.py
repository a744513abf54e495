"""Random damage to a file: bytes, structure of JSON, and what may stand in a file's place."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Generator = np.random.Generator


def damage(path: Path, generator: Generator) -> str:
    """Damages a file in one way, drawn at random, and returns a name for it."""
    content = path.read_bytes()
    if generator.random() < 0.02:
        path.unlink()
        path.mkdir()
        return "a folder in its place"
    structured = any(map(_parsed, [content, *content.split(b"\n")]))
    kinds = [*_BYTES, *([_json] * len(_BYTES) if structured else [])]
    kind = kinds[generator.integers(len(kinds))]
    damaged = kind(content, generator)
    path.write_bytes(damaged)
    return f"{kind.__name__.strip('_')}: {_difference(content, damaged)}"


def restore(path: Path, content: bytes) -> None:
    """Undoes ``damage``."""
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(content)


def _difference(before: bytes, after: bytes) -> str:
    place = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    return f"{len(before)} to {len(after)} bytes, first difference at {place}: {after[place : place + 60]!r}"


def _parsed(text: bytes) -> Any:
    """The value of a JSON object or array; None if it is neither."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict | list) and value else None


def _place(content: bytes, generator: Generator) -> int:
    """A place in the content; half of them near an end, where headers and tables of contents stand."""
    size = max(1, len(content))
    near = int(min(size - 1, generator.integers(0, 512)))
    return [near, size - 1 - near, *[int(generator.integers(size))] * 2][generator.integers(4)]


def _flip_bit(content: bytes, generator: Generator) -> bytes:
    place = _place(content, generator)
    changed = content[place] ^ (1 << int(generator.integers(8))) if content else 0
    return content[:place] + bytes([changed]) + content[place + 1 :]


def _flip_bits(content: bytes, generator: Generator) -> bytes:
    for _ in range(int(generator.integers(2, 20))):
        content = _flip_bit(content, generator)
    return content


def _set_number(content: bytes, generator: Generator) -> bytes:
    """Overwrites four or eight bytes, as of a size in a header, by an extreme number."""
    place, width = _place(content, generator), int(generator.choice([4, 8]))
    value = int(generator.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))
    return content[:place] + value.to_bytes(width, "little") + content[place + width :]


def _truncate(content: bytes, generator: Generator) -> bytes:
    return content[: _place(content, generator)]


def _cut_out(content: bytes, generator: Generator) -> bytes:
    place = _place(content, generator)
    return content[:place] + content[place + int(generator.integers(1, 200)) :]


def _zeros(content: bytes, generator: Generator) -> bytes:
    place, size = _place(content, generator), int(generator.integers(1, 600))
    return content[:place] + bytes(min(size, len(content) - place)) + content[place + size :]


def _noise(content: bytes, generator: Generator) -> bytes:
    place = _place(content, generator)
    return content[:place] + generator.bytes(int(generator.integers(1, 64))) + content[place:]


def _deep(content: bytes, generator: Generator) -> bytes:
    opened = [b"[", b'{"a":', b"[[{"][generator.integers(3)]
    place = 0 if generator.random() < 0.5 else _place(content, generator)
    return content[:place] + opened * int(10 ** generator.uniform(1, 5)) + content[place:]


_BYTES: tuple[Callable[[bytes, Generator], bytes], ...] = (
    *[_flip_bit] * 4,
    _flip_bits,
    _set_number,
    _truncate,
    _truncate,
    _cut_out,
    _zeros,
    _noise,
    _deep,
)


class _Raw(str):
    """Text that stands in a JSON file as it is, though JSON or Python has no such value."""


_VALUES: tuple[Any, ...] = (
    *[None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 2**63, -(2**63), 10**9, 10**30],
    *["", "2", "false", "NaN", "\0", "x" * 10_000, "../../x", "\ud800"],
    *[[], {}, [[]], {"": {}}, [1, "2", None], math.nan, math.inf, -math.inf],
    *map(_Raw, ["1e999", "1" * 5000, "01", "'x'", "+1", "[" * 3000, "[" * 3000 + "]" * 3000, "nan", "0x10"]),
)


def _json(content: bytes, generator: Generator) -> bytes:
    """Changes one field of a JSON file, or of one line of a jsonl file."""
    lines = [content] if _parsed(content) else content.split(b"\n")
    objects = [number for number, line in enumerate(lines) if _parsed(line)]
    number = objects[generator.integers(len(objects))]
    value = _parsed(lines[number])
    places: list[tuple[Any, Any]] = []

    def collect(inside: Any) -> None:
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                collect(inside[key])

    collect(value)
    raw: dict[str, str] = {}
    inside, key = places[generator.integers(len(places))]
    kind = generator.integers(6)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        inside[f"{key}x"] = inside.pop(key)
    elif kind == 2 and isinstance(inside, dict):
        other = _VALUES[generator.integers(13)]
        raw["twice"] = f"{json.dumps(inside[key])}, {json.dumps(key)}: {json.dumps(other)}"
        inside[key] = "\0twice"
    elif kind == 3 and isinstance(inside[key], int | float):
        old = inside[key]
        changed = [str(old), old + 1, -old, old * 10, float(old) if isinstance(old, int) else int(old)]
        inside[key] = changed[generator.integers(len(changed))]
    elif kind == 4:
        inside[key] = [inside[key]]
    else:
        chosen = _VALUES[generator.integers(len(_VALUES))]
        raw["raw"] = chosen if isinstance(chosen, _Raw) else json.dumps(chosen)
        inside[key] = "\0raw"
    text = json.dumps(value)
    for name, replacement in raw.items():
        text = text.replace(json.dumps(f"\0{name}"), replacement)
    lines[number] = text.encode()
    return b"\n".join(lines)
