"""A reader of files: how a small valid file is written, and how it is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class FileReader:
    """A reader; ``make`` writes files into an empty folder and returns the one to damage.

    ``keeps`` says what it may return of a damaged file that it accepts: nothing but the original ("same");
    whole rows of it in order, of a log that a kill may have cut ("rows"); or, of formats of other programs,
    which have no digest, another value of the right types and ranges ("legal").
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    keeps: Literal["same", "rows", "legal"] = "same"
