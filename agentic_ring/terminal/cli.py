"""Flags of every script, and their help."""

import inspect
import os
import re
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from agentic_ring.extras import needs_extra
from agentic_ring.terminal.command import run_command

with needs_extra("models"):
    import tyro

optional_flag = partial(tyro.conf.arg, help_behavior_hint="")
"""Marks a flag whose help text itself names the default."""
switch = tyro.conf.FlagCreatePairsOff
"""Marks a flag that only turns something on: there is no ``--no-...``."""

_FLAG_SECTIONS = ("Args:", "Attributes:")
_LIST_ITEM = re.compile(r"([*-]|\d+\.) ")


def run(main: Callable[..., int | None], **tyro_options: Any) -> None:
    """Parses the command line for ``main``'s signature, calls it and exits as ``run_command`` does."""
    for documented in (main, *typing.get_type_hints(main).values()):
        if documented.__doc__ and (inspect.isfunction(documented) or is_dataclass(documented)):
            documented.__doc__ = _join_paragraphs(documented.__doc__)
    if os.environ.get("NO_COLOR"):
        tyro._experimental_options["ansi_codes"] = False
    run_command(partial(tyro.cli, main, **tyro_options))


def _join_paragraphs(docstring: str) -> str:
    """Joins the lines of each paragraph and of each flag's description into one line.

    The width of the terminal then decides where help breaks. Lists and indented code keep their lines.
    """
    lines: list[str] = []
    entry_indent = None  # of the flags' names, within a section that describes flags
    for line in inspect.cleandoc(docstring).splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        before = lines[-1] if lines else ""
        if text and not indent:
            entry_indent = None
        if before in _FLAG_SECTIONS:
            entry_indent = indent
        if entry_indent is None:
            continues = not indent and not before.startswith(" ") and not before.endswith(":")
        else:
            continues = indent > entry_indent
        if continues and text and before and not _LIST_ITEM.match(text):
            lines[-1] += f" {text}"
        else:
            lines.append(line)
    return "\n".join(lines)
