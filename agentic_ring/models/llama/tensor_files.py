"""Tensors of a model's files by their names in Hugging Face's layout: read part by part, and saved."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Set
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.json_files import read_json
from agentic_ring.files.model_path import is_gguf
from agentic_ring.files.read_errors import remedy_for
from agentic_ring.models.llama.config_file import REMEDY

with needs_extra("models"):
    from pydantic import BaseModel, Field
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
_REDUNDANT = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Name endings of tensors that the configuration already determines."""
_COMPARED_ROWS = 4096
_READABLE = ("F32", "F16", "BF16")


def open_tensors(path: Path) -> "TensorFiles":
    """Returns the tensors of a folder in Hugging Face's layout, or of a GGUF file."""
    if is_gguf(path):
        from agentic_ring.models.llama.gguf_checkpoint import GgufTensors

        return GgufTensors(path)
    return SafetensorsFiles(path)


class TensorFiles(ABC):
    """Read-only access to the tensors of a model.

    Any method raises a DataError if there are no weights, or a file is missing, damaged or not supported.

    Attributes:
      path: folder or file of the weights.
      config_name: what describes the model beside them, for messages.
    """

    path: Path
    config_name: str

    @property
    @abstractmethod
    def names(self) -> Set[str]:
        """Names of all tensors, as they are stored."""

    def stored_name(self, name: str) -> str:
        """The name under which a tensor is stored."""
        return name

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; raises a DataError if it is stored as a data type that is not supported."""

    @abstractmethod
    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor, in its stored dtype, or float32 if that is quantised."""

    def check_names(self, wanted: set[str], tied: bool) -> None:
        """Raises a DataError if the files do not hold exactly the ``wanted`` tensors.

        A head that repeats the embedding it is ``tied`` to, and tables of rotary frequencies, are ignored.
        """
        wanted = {self.stored_name(name) for name in wanted}
        present = {name for name in self.names if not name.endswith(_REDUNDANT)}
        if tied:
            present.discard(HEAD)
        if wanted != present:
            missing, unknown = sorted(wanted - present), sorted(present - wanted)
            parts = "; ".join(
                f"{len(names)} tensors are {kind}, such as {names[0]}"
                for kind, names in (("missing", missing), ("unknown", unknown))
                if names
            )
            remedy = "Fetch the model again"
            if missing == [HEAD] and not unknown:
                remedy = "If its head is its embedding, set tie_word_embeddings to true in config.json"
            raise DataError(
                f"the weights in {self.path} do not fit its {self.config_name}: {parts}. {remedy}"
            )

    def differ(self, name: str, other: str) -> bool:
        """Whether there is a tensor of this name, and it has other values than the other one."""
        if name not in self.names or other not in self.names:
            return False
        shape, step = self.shape(name), _COMPARED_ROWS
        parts = ((slice(row, min(row + step, shape[0])),) for row in range(0, shape[0], step))
        return shape != self.shape(other) or any(
            not np.array_equal(self.read(name, part), self.read(other, part)) for part in parts
        )


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, Field(max_length=200, pattern=r"\.safetensors$")]]


class SafetensorsFiles(TensorFiles):
    """Tensors in ``model.safetensors``, or in several files with an index; only pickled ones are an error."""

    config_name = "config.json"

    def __init__(self, folder: Path, single: str = SINGLE):
        """``single`` is the name of the file that holds all tensors, where there is no index."""
        self.path, self._single = folder, single
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._slice(name)
        if tensor.get_dtype() not in _READABLE:
            raise DataError(
                f"{name} in {self._files[name]} is stored as {tensor.get_dtype()}; only "
                f"{', '.join(_READABLE)} are read, so give a checkpoint that is not quantised"
            )
        return tuple(tensor.get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._slice(name)[index]

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        try:
            return self._open[path].get_slice(name)
        except SafetensorError as error:
            fault = f"has no tensor {name}, though its index says so; fetch it again"
            raise DataError(f"{path} {fault}") from error

    @cached_property
    def _files(self) -> dict[str, Path]:
        index = self.path / INDEX
        if index.exists():
            weight_map = read_json(index, _Index, REMEDY, foreign=True).weight_map
            files = {name: self.path / Path(file).name for name, file in weight_map.items()}
            for path in sorted(set(files.values())):
                if not path.exists():
                    raise DataError(f"{path} does not exist, though {index} names it; fetch it")
            return files
        single = self.path / self._single
        if single.exists():
            return dict.fromkeys(_opened(single).keys(), single)
        pickles = sorted(path.name for pattern in _PICKLES for path in self.path.glob(pattern))
        if pickles:
            raise DataError(
                f"{self.path} holds only pickled weights ({pickles[0]}), which can run any code when "
                "they are opened and are not read. If you trust them, convert them with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise DataError(f"{self.path} holds neither {self._single} nor {INDEX}; give a model's folder")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy").__enter__()
    except (SafetensorError, OSError) as error:
        remedy = remedy_for(error, "it may be cut short; fetch it again")
        raise DataError(f"{path} cannot be read as safetensors ({error}); {remedy}") from error


def save_tensors(content: dict[str, np.ndarray], path: Path) -> None:
    """Writes a new safetensors file; an ``OSError`` on a full disk."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # the only sign of an error of the disk
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(mode)  # safetensors leaves it readable by its owner alone
