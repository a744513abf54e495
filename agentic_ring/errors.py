"""Errors that a user can act on.

Each message names the bad value, what was expected and the remedy, so that a command-line program
prints only the message. Every class also derives from the built-in exception that a caller of the
library would expect to catch.
"""


class AgenticRingError(Exception):
    """Base of all errors whose message is written for the user."""


class ArgumentError(AgenticRingError, ValueError):
    """An argument of a public function has the wrong shape, dtype or value."""


class ConfigError(AgenticRingError, ValueError):
    """A configuration contains values that do not fit together."""


def check_at_least_one(config: object, *names: str) -> None:
    """Raises a ``ConfigError`` if one of these attributes of a configuration is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1")


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


class NonFiniteLossError(AgenticRingError, ArithmeticError):
    """The loss of training is not finite."""
