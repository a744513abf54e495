"""Reading of tensors, whole or in part, from the safetensors files of a model's folder."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra
from agentic_ring.models.llama.config_fields import read_index

with needs_extra("models"):
    from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
_REDUNDANT = ("rotary_emb.inv_freq",)
"""Name endings of tensors in older files that the configuration already determines."""
_READABLE = ("F32", "F16", "BF16")


class TensorFiles:
    """Read-only access to tensors by name.

    Args:
      folder: folder with ``model.safetensors``, or with several files and their index.

    Raises:
      DataError: there are no weights, only pickled ones, or a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[Path, Any] = {}

    def check_names(self, wanted: set[str], tied: bool) -> None:
        """Checks that the files hold exactly the ``wanted`` tensors.

        Raises:
          DataError: names missing and unknown tensors. A head that is stored although it is ``tied``, and
            tables of rotary frequencies, are ignored.
        """
        present = {name for name in self._files if not name.endswith(_REDUNDANT)}
        if tied:
            present.discard("lm_head.weight")
        if wanted != present:
            missing, unknown = sorted(wanted - present), sorted(present - wanted)
            parts = [
                f"{len(names)} tensors are {kind}, such as {names[0]}"
                for kind, names in (("missing", missing), ("unknown", unknown))
                if names
            ]
            raise DataError(
                f"the weights in {self._folder} do not fit its config.json: {'; '.join(parts)}. Fetch the "
                "model again"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
          DataError: its data type is not supported, for example a quantised one.
        """
        tensor = self._slice(name)
        if tensor.get_dtype() not in _READABLE:
            raise DataError(
                f"{name} in {self._files[name]} is stored as {tensor.get_dtype()}; only "
                f"{', '.join(_READABLE)} are read, so give a checkpoint that is not quantised"
            )
        return tuple(tensor.get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor in its stored dtype."""
        return self._slice(name)[index]

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        try:
            return self._open[path].get_slice(name)
        except SafetensorError as error:
            raise DataError(
                f"{path} has no tensor {name}, though its index says so; fetch it again"
            ) from error

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of each tensor."""
        index = self._folder / INDEX
        if index.exists():
            files = {name: self._folder / Path(file).name for name, file in read_index(index).items()}
            for path in sorted(set(files.values())):
                if not path.exists():
                    raise DataError(f"{path} does not exist, though {index} names it; fetch it")
            return files
        single = self._folder / SINGLE
        if single.exists():
            return dict.fromkeys(_opened(single).keys(), single)
        pickles = sorted(path.name for pattern in _PICKLES for path in self._folder.glob(pattern))
        if pickles:
            raise DataError(
                f"{self._folder} holds only pickled weights ({pickles[0]}), which can run any code when "
                "they are opened and are not read. If you trust them, convert them with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise DataError(f"{self._folder} holds neither {SINGLE} nor {INDEX}; give a model's folder")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy").__enter__()
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as safetensors: {error}. It may be cut short; fetch it again"
        ) from error
