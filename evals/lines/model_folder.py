"""A model by its folder, or by its name on Hugging Face."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from agentic_ring.errors import DataError

_FILES = ("*.json", "*.safetensors", "*.jinja")


def model_folder(model: str) -> Path:
    """The folder of a model; what has a name of the form ``organisation/name`` is fetched, once.

    Raises:
      DataError: there is no such folder and no such name, or it cannot be fetched.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise DataError(f"there is no folder {model}; give one, or a name on Hugging Face, organisation/name")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES)))
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{model} is no folder here, was not fetched before, and Hugging Face cannot be reached. Where "
            f"it can be, run `hf download {model} --local-dir FOLDER`, and give that folder with --model"
        ) from error
    except HFValidationError as error:
        raise DataError(f"{model} is neither a folder here nor a name on Hugging Face") from error
    except HfHubHTTPError as error:
        raise DataError(
            f"{model} cannot be fetched from Hugging Face: {error}. A model that asks for consent needs "
            "`hf auth login` first"
        ) from error
