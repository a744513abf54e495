"""How every script starts: parse the flags, run, and turn a user's error into one message."""

import errno
import sys
from collections.abc import Callable
from typing import Any

import tyro

from agentic_ring.errors import AgenticRingError


def run(main: Callable[..., int | None], **tyro_options: Any) -> None:
    """Parses the command line for ``main``'s signature, calls it and exits.

    Exit status: what ``main`` returns (None is 0); 1 with one message on standard error for an
    ``AgenticRingError`` or a full disk; 2 for wrong flags; 130 when interrupted.
    """
    try:
        status = tyro.cli(main, **tyro_options)
    except AgenticRingError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"error: no space left on the disk while writing {error.filename}; free some and run "
            "the same command again",
            file=sys.stderr,
        )
        status = 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        status = 130
    sys.exit(status or 0)
