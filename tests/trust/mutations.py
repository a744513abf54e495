"""Random damage to a file: bytes, structure of JSON, and what may stand in a file's place."""

import json
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
    if any(map(_parsed, [content, *content.split(b"\n")])) and generator.random() < 0.5:
        kind, damaged = "json", _change_json(content, generator)
    else:
        kind = _draw(generator, [*BYTES, "flip bit", "flip bit", "flip bit", "truncate"])
        damaged = BYTES[kind](content, _place(content, generator), generator)
    path.write_bytes(damaged)
    return f"{kind}: {len(content)} to {len(damaged)} bytes"


def _draw(generator: Generator, choices: Any) -> Any:
    return choices[generator.integers(len(choices))]


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
    return _draw(generator, [near, size - 1 - near, *[int(generator.integers(size))] * 2])


def _replaced(content: bytes, place: int, size: int, replacement: bytes) -> bytes:
    return content[:place] + replacement + content[place + size :]


def _flip_bits(content: bytes, place: int, generator: Generator, more: int = 0) -> bytes:
    """Flips a bit at ``place``, and ``more`` elsewhere."""
    for _ in range(more + 1):
        changed = content[place] ^ (1 << int(generator.integers(8))) if content else 0
        content = _replaced(content, place, 1, bytes([changed]))
        place = _place(content, generator)
    return content


SIZES = [size.to_bytes(w, "little") for w in (4, 8) for size in (0, 1, 2**31 - 1, 2**31, 2**32 - 1)]
"""Extreme numbers, as of a size in a header."""
OPENED = [opened * 10**power for opened in (b"[", b'{"a":', b"[[{") for power in range(1, 6)]
BYTES: dict[str, Callable[[bytes, int, Generator], bytes]] = {
    "flip bit": _flip_bits,
    "flip bits": lambda c, at, g: _flip_bits(c, at, g, int(g.integers(1, 19))),
    "set byte": lambda c, at, g: _replaced(c, at, 1, bytes([_draw(g, b"\0\xff\x7f\x809-" + b'"')])),
    "set number": lambda c, at, g: _replaced(c, at, len(size := _draw(g, SIZES)), size),
    "truncate": lambda c, at, g: c[:at],
    "empty": lambda c, at, g: b"\n" * int(g.integers(2)),
    "cut out": lambda c, at, g: _replaced(c, at, int(g.integers(1, 200)), b""),
    "repeat": lambda c, at, g: c[: at + int(g.integers(1, 200))] + c[at:],
    "zeros": lambda c, at, g: _replaced(c, at, (n := min(int(g.integers(1, 600)), len(c) - at)), bytes(n)),
    "insert": lambda c, at, g: _replaced(c, at, 0, g.bytes(int(g.integers(1, 64)))),
    "append": lambda c, at, g: c + g.bytes(int(g.integers(1, 2000))),
    "mark": lambda c, at, g: _draw(g, [b"\xef\xbb\xbf", b"\xff\xfe", b"\xff"]) + c,
    "encode": lambda c, at, g: c.decode("latin-1").encode(_draw(g, ["utf-16", "utf-32", "utf-7"])),
    "nest": lambda c, at, g: _replaced(c, _draw(g, [0, at]), 0, _draw(g, OPENED)),
}
VALUES = ["null", "true", "false", "0", "-1", "1", "0.5", "-0.0", "1e308", "1e999", "01", "'x'", "+1", "0x10"]
VALUES += ["nan", "NaN", "Infinity", "-Infinity", "1" * 5000, *map(str, (2**63, -(2**63), 10**9, 10**30))]
VALUES += ['"2"', '"false"', '"NaN"', r'"\u0000"', f'"{"x" * 10_000}"', '"../../x"', r'"\ud800"', '""', "[]"]
VALUES += ["{}", "[[]]", '{"": {}}', '[1, "2", null]', "[" * 3000, "[" * 3000 + "]" * 3000]
"""What may stand in a JSON file, though JSON or Python may have no such value."""


def _places(inside: Any) -> list[tuple[Any, Any]]:
    """All fields, at any depth, each as what holds it and its key there."""
    keys = inside if isinstance(inside, dict) else range(len(inside) if isinstance(inside, list) else 0)
    return [place for key in keys for place in [(inside, key), *_places(inside[key])]]


def _change_json(content: bytes, generator: Generator) -> bytes:
    """Changes one field of a JSON file, or of one line of a jsonl file."""
    lines = [content] if _parsed(content) else content.split(b"\n")
    number = _draw(generator, [number for number, line in enumerate(lines) if _parsed(line)])
    value = _parsed(lines[number])
    inside, key = _draw(generator, _places(value))
    old, kind, raw = inside[key], generator.integers(6), ""
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        inside[f"{key}x"] = inside.pop(key)
    elif kind == 2 and isinstance(inside, dict):
        raw = f"{json.dumps(old)}, {json.dumps(key)}: {_draw(generator, VALUES[:9])}"
    elif kind == 3 and isinstance(old, int | float):
        converted = float(old) if isinstance(old, int) else int(old)
        inside[key] = _draw(generator, [str(old), old + 1, -old, old * 10, converted])
    elif kind == 4:
        inside[key] = [old]
    else:
        raw = _draw(generator, VALUES)
    if raw:
        inside[key] = "\0raw"
    lines[number] = json.dumps(value).replace(json.dumps("\0raw"), raw).encode()
    return b"\n".join(lines)
