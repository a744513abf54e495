"""Damaged files: each is refused with one message that names it, or read as if it were whole.

A reader never raises another error, hangs or takes memory that a header asks for. ``FileReader.keeps`` says
which other values it may return; all of them have been checked for type and range. The seed is in the
report's header, and the counts follow it. AGENTIC_RING_TRUST_MUTATIONS sets the mutations of each file.
"""

import os
import resource
import shutil
import signal
import warnings
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from agentic_ring.errors import AgenticRingError
from tests.trust.daily_seed import daily_seed
from tests.trust.mutations import damage
from tests.trust.readers import READERS, FileReader

MUTATIONS = int(os.environ.get("AGENTIC_RING_TRUST_MUTATIONS", "12"))
SECONDS = 20
OUTCOMES = ("refused", "read as the whole file", "whole rows of it", "another legal value")


def comparable(value: Any) -> Any:
    """The value as nested tuples that are equal where every type, shape and bit is."""
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if is_dataclass(value):
        return type(value).__name__, *(comparable(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, dict):
        return "dict", *sorted((repr(key), comparable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return "list", *map(comparable, value)
    return type(value).__name__, repr(value)


def outcome(reader: FileReader, path: Path, whole: Any) -> str:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        found = comparable(reader.read(path))
    except AgenticRingError as error:
        message = str(error)
        named = path.name in message or str(path.parent) in message
        return "refused" if named else f"FAULT: refused without the file's name: {message}"
    except BaseException as error:  # a panic of a Rust library is no Exception
        return f"FAULT: {type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if found == whole:
        return "read as the whole file"
    rows = iter(whole)
    if reader.keeps == "rows" and all(row in rows for row in found):
        return "whole rows of it"
    return "another legal value" if reader.keeps == "legal" else "FAULT: another value"


@pytest.fixture(autouse=True)
def strict():
    """A reader that hangs is interrupted; warnings of libraries about damaged files are no errors."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the reader took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])
def test_a_damaged_file_is_refused_or_read_as_if_whole(reader, tmp_path, record_property):
    path = tmp_path / (reader.file or reader.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    reader.make(path)
    (path,) = path.parent.glob(path.name)
    whole = comparable(reader.read(path))
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    generator = np.random.default_rng([daily_seed(), crc32(reader.name.encode())])
    outcomes: Counter[str] = Counter()
    faults = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS):
        how = damage(path, generator)
        found = outcome(reader, path, whole)
        if found.startswith("FAULT"):
            faults.append(f"{how}\n    -> {found}")
        outcomes[found.split(":")[0]] += 1
        if path.is_dir():
            shutil.rmtree(path)
        for file, content in files.items():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert not faults, f"{len(faults)} of {MUTATIONS} with seed {daily_seed()}:\n" + "\n".join(faults[:20])
    assert grown < 400 << 20, f"memory grew by {grown:,} bytes"
    assert comparable(reader.read(path)) == whole
    counts = [str(outcomes[name]) for name in OUTCOMES]
    record_property("trust", f"| {reader.name} | {MUTATIONS} | {' | '.join(counts)} |")
