"""Parts of the package that need more than JAX and NumPy say which extra brings what they lack."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from agentic_ring.errors import MissingExtraError


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Imports in the block that find no package raise a ``MissingExtraError`` that names ``extra``.

    A program that does not catch the error ends with its message only, without a traceback.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if isinstance(error, MissingExtraError) or package == "agentic_ring":
            raise
        if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
            sys.excepthook = _print_message
        install = f"pip install 'agentic_ring[{extra}]'"
        message = f"{package} is not installed; run: {install}"
        if package in ("dm_control", "shimmy", "mujoco") and sys.version_info >= (3, 13):
            message = (
                f"{package} is not installed. The extra {extra} needs Python 3.11 or 3.12, and this is "
                f"{'.'.join(map(str, sys.version_info[:2]))}: labmaze, which dm_control needs, has wheels "
                f"for these two only. Make an environment with one of them and run: {install}"
            )
        raise MissingExtraError(message, name=package) from error


def _print_message(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, MissingExtraError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
