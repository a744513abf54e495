"""How long a text a model is used on."""

from pathlib import Path

from agentic_ring.errors import ConfigError
from agentic_ring.models.llama.config_file import original_context
from agentic_ring.progress import say


def usable_context(folder: Path, asked: int | None, allow_extrapolation: bool) -> int:
    """Tokens of a text, checked against those that the model in ``folder`` was made for.

    Args:
      folder: with config.json.
      asked: as many; what the model was made for where absent.
      allow_extrapolation: beyond that, warn and go on.

    Raises:
      ConfigError: fewer than 1, more than the model was made for, or neither is known.
      DataError: there is no config.json.
    """
    made_for = original_context(folder)
    context = made_for if asked is None else asked
    if context is None:
        raise ConfigError(f"{folder} does not say how long a text the model was made for; give a length")
    if context < 1:
        raise ConfigError(f"a context of {context} tokens; it must be at least 1")
    if made_for is not None and context > made_for:
        if not allow_extrapolation:
            raise ConfigError(
                f"a context of {context} tokens is asked for, but the model was made for {made_for}; give "
                "--allow-extrapolation to go beyond"
            )
        say(f"warning: the model was made for {made_for} tokens, and is used on up to {context}")
    return context
