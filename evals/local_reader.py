"""A model on the devices that are here as a reader of documents."""

from agentic_ring.errors import ConfigError
from evals.readers import Reader


def open_reader(model: str | None) -> Reader:
    """Opens the model in this folder or of this Hugging Face name; without either the embedded one.

    Raises:
      ConfigError: it cannot be opened.
    """
    raise ConfigError(f"the model {model or 'that is embedded'} cannot be run here yet; give an --endpoint")
