"""Errors that a user can act on.

Each message names the bad value, what was expected and the remedy, so that a command-line program
prints only the message. Every class also derives from the built-in exception that a caller of the
library would expect to catch.
"""

import math
from collections.abc import Iterable

import numpy as np

EXIT_STOPPED = 75
"""Exit status (EX_TEMPFAIL) of a command that a signal stopped: the same command continues it."""
EXIT_PROCESS_LOST = 76
"""Exit status where another process of the job was lost or hangs: the same command continues the job."""
EXIT_INTERRUPTED = 130
"""Exit status after a second Ctrl-C, which waits for nothing."""
EXIT_UNREAD = 141
"""Exit status, a shell's for SIGPIPE, where nobody reads the output any more (``command | head``)."""


class AgenticRingError(Exception):
    """Base of all errors whose message is written for the user."""

    exit_status = 1
    """Exit status of a command that ends with this error."""


class StopRequested(KeyboardInterrupt):
    """A signal asked the command to stop; like ``KeyboardInterrupt``, it is no ``Exception``."""


class ArgumentError(AgenticRingError, ValueError):
    """An argument of a public function has the wrong shape, dtype or value."""


class ConfigError(AgenticRingError, ValueError):
    """A configuration contains values that do not fit together."""


def check_at_least_one(config: object, *names: str, at_most: int = 2**31 - 1) -> None:
    """Raises a ``ConfigError`` if one of these attributes is not a whole number from 1 to ``at_most``."""
    for name in names:
        value = getattr(config, name)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not (whole and 1 <= value <= at_most):
            limits = f"at least 1 and at most {at_most}"
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, {limits}")


def check_positive(config: object, *names: str, below: float = math.inf) -> None:
    """Raises a ``ConfigError`` if one of these attributes is not a number above 0 and below ``below``."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not 0 < value < below:
            limit = "finite" if below == math.inf else f"below {below}"
            raise ConfigError(f"{name} is {value!r}; it must be a number above 0 and {limit}")


def check_choice(config: object, name: str, known: Iterable[str]) -> None:
    """Raises an ``UnknownNameError`` if this attribute of a configuration is not one of the known names."""
    value, known = getattr(config, name), tuple(known)
    if value not in known:
        raise UnknownNameError(name, str(value), known)


def set_fields(config: object, *names: str) -> list[str]:
    """Those of the attributes that are not None."""
    return [name for name in names if getattr(config, name) is not None]


class MissingExtraError(AgenticRingError, ModuleNotFoundError):
    """A package is not installed; the message names the extra of agentic_ring that brings it."""


class MeshError(AgenticRingError, ValueError):
    """The devices cannot form the requested mesh."""


class UnknownNameError(AgenticRingError, ValueError):
    """A name (task, domain, collector, preset) does not exist; the message lists those that do."""

    def __init__(self, kind: str, name: str, known: list[str] | tuple[str, ...]):
        super().__init__(f"unknown {kind} {name!r}; choose one of: {', '.join(known)}")


class DataError(AgenticRingError, ValueError):
    """An input file is missing, damaged or not of the expected format."""


class StoreError(DataError):
    """A trajectory store cannot be read: another version, damaged bytes or missing arrays."""


class CheckpointError(AgenticRingError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class FolderInUseError(AgenticRingError, RuntimeError):
    """Another process writes to the same folder."""


class NonFiniteLossError(AgenticRingError, ArithmeticError):
    """The loss of training is not finite."""
