"""GGUF files, the format of llama.cpp: metadata by key, and tensors that are dequantised when they are read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.read_errors import remedy_for

with needs_extra("gguf"):
    import gguf

_REMEDY = "it may be cut short; fetch it again, or give a model's folder"


def open_gguf(path: Path) -> "GgufFile":
    """Opens a GGUF file; one that is still the same is not parsed again, which takes seconds.

    Raises:
      DataError: there is none, it is damaged, in several files, or its numbers are big-endian.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened ({error.strerror}); give a GGUF file or a folder"
        ) from error
    return _opened(path, status.st_mtime_ns, status.st_size)


class GgufFile:
    """Read-only access to a GGUF file; ``open_gguf`` opens one.

    Attributes:
      path: the file that was opened.
      fields: metadata by key.
      tensors: names of its tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _CheckedReader(path)
            self.fields = {name: _plain(field.contents()) for name, field in reader.fields.items()}
        # The library raises many classes, from OSError to UnicodeDecodeError.
        except Exception as error:
            remedy = remedy_for(error, _REMEDY)
            raise DataError(f"{path} cannot be read as GGUF ({error}); {remedy}") from error
        if reader.endianess == gguf.GGUFEndian.BIG:
            raise DataError(f"{path} is big-endian; fetch or convert the little-endian file of this model")
        if (parts := self.fields.get("split.count", 1)) not in (0, 1):
            raise DataError(
                f"{path} is one of {parts} files of a model; join them with "
                "`llama-gguf-split --merge FIRST_FILE OUTPUT`"
            )
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.tensors = frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as of a NumPy array."""
        return tuple(self._tensors[name].shape.tolist()[::-1])

    def storage(self, name: str) -> str:
        """How a tensor is stored, such as F32 or Q4_1."""
        return self._tensors[name].tensor_type.name

    def read(self, name: str, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Reads whole rows of a tensor as float32; only these are dequantised.

        Raises:
          DataError: its quantisation is not known.
        """
        stored = self._tensors[name]
        try:
            values = gguf.dequantize(stored.data[rows], stored.tensor_type)
        except NotImplementedError as error:
            raise DataError(
                f"{name} in {self.path} is stored as {self.storage(name)}, which is not supported; take the "
                "model in another quantisation, such as Q8_0 or Q4_K_M"
            ) from error
        # Arrays that JAX may keep without a copy must not change with the file.
        return values.copy() if np.may_share_memory(values, stored.data) else values


class _CheckedReader(gguf.GGUFReader):
    """Refuses to read beyond the end of the file, where the library returns fewer values than asked for.

    Its views are plain arrays, which take less time and memory than those of a memory map.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) != count:
            raise ValueError(f"it ends where {count} values are expected, after byte {offset}")
        return values


@lru_cache(maxsize=2)
def _opened(path: Path, modified: int, size: int) -> GgufFile:
    return GgufFile(path)


def _plain(value: Any) -> Any:
    """A float32 as the shortest number that is rounded to it: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) and value == np.float32(value) else value
