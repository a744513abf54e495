"""Reads and writes packed rows: a sealed HDF5 file (``sealed_hdf5.py``) of R rows of T tokens.

    attributes     tokenizer (digest), vocab_size, template
    tokens         int32 [R, T]    0 where padding
    counts         uint8 [R, T]    1 where the prediction of the token counts in the loss
    segment_ids    int32 [R, T]    index of the token's text within the row; -1 where padding

``PackedRow`` derives targets, weights and positions from these.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from agentic_ring.data.sealed_hdf5 import FileKind, SealedReader, write_sealed
from agentic_ring.data.text.packing import PackedRow
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, StoreError
from agentic_ring.extras import needs_extra

with needs_extra("text"):
    import h5py

PACKED = FileKind(
    name="agentic_ring packed text",
    version=1,
    noun="file of packed rows",
    command="python -m data_prep.sharegpt",
    rewrite="pack the conversations again",
)
_DTYPES = {
    "tokens": np.dtype(np.int32),
    "counts": np.dtype(np.uint8),
    "segment_ids": np.dtype(np.int32),
}
_CHUNK_TOKENS = 1 << 16


@dataclass(frozen=True)
class PackedDescription:
    """Tokenizer and template of the rows.

    Attributes:
      tokenizer: ``Tokenizer.digest``.
      vocab_size: vocabulary size of the tokenizer; every id is below it.
      template: name of the chat template.
    """

    tokenizer: str
    vocab_size: int
    template: str


class PackedWriter:
    """Adds rows to a new file; see ``packed_writer``."""

    def __init__(self, file: h5py.File, check_disk: Callable[[], None], length: int):
        self._check_disk = check_disk
        self._length = length
        chunks = (1, min(length, _CHUNK_TOKENS))
        self._arrays = {
            # Compression is cheap: runs of equal numbers, and ids that need half their bytes.
            name: file.create_dataset(
                name,
                (0, length),
                dtype,
                maxshape=(None, length),
                chunks=chunks,
                compression="gzip",
                compression_opts=1,
                shuffle=True,
                fletcher32=True,
            )
            for name, dtype in _DTYPES.items()
        }
        self.rows = 0
        """Number of rows written so far."""

    def add(self, row: PackedRow) -> None:
        """Writes one more row.

        Raises:
          ArgumentError: the row has another length.
          OSError: the disk is full.
        """
        if len(row.tokens) != self._length:
            raise ArgumentError(
                f"the row has {len(row.tokens)} tokens, expected {self._length} as in the whole file"
            )
        for name, array in self._arrays.items():
            array.resize(self.rows + 1, axis=0)
            array[self.rows] = getattr(row, name)
        self.rows += 1
        self._check_disk()


@contextmanager
def packed_writer(path: Path, description: PackedDescription, length: int) -> Iterator[PackedWriter]:
    """Writes a new file, which replaces ``path`` once the block ends without an error.

    Raises:
      OSError: the disk is full.
    """
    with write_sealed(path, PACKED) as (file, check_disk):
        file.attrs.update(asdict(description))
        yield PackedWriter(file, check_disk, length)


class PackedRows(SealedReader):
    """Read access to packed rows of ``length`` tokens; a context manager."""

    kind = PACKED

    def _read_tables(self) -> None:
        attributes = self._file.attrs
        vocab_size = int(np.asarray(attributes["vocab_size"]))
        self.description = PackedDescription(
            str(attributes["tokenizer"]), vocab_size, str(attributes["template"])
        )
        self._arrays: dict[str, h5py.Dataset] = {}
        for name, dtype in _DTYPES.items():
            array = self._file[name]
            if not isinstance(array, h5py.Dataset) or array.dtype != dtype or array.ndim != 2:
                raise ValueError(f"{name} is no array [R, T] of {dtype}")
            self._arrays[name] = array
        shapes = {name: array.shape for name, array in self._arrays.items()}
        if len(set(shapes.values())) != 1:
            raise ValueError(f"its arrays have shapes {shapes}, expected one")
        self._count, self.length = shapes["tokens"]

    def __len__(self) -> int:
        """Number of rows R."""
        return self._count

    def __getitem__(self, index: int) -> PackedRow:
        """Returns one row.

        Raises:
          ArgumentError: there is no such row.
          StoreError: the row is damaged, or holds an id outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise ArgumentError(f"row {index} is outside the {len(self)} of {self.path}")
        try:
            tokens, counts, segment_ids = (self._arrays[name][index] for name in _DTYPES)
        except OSError as error:
            raise StoreError(
                f"{self.path}: row {index} is damaged ({error}); delete the file and {PACKED.rewrite}"
            ) from error
        if tokens.min() < 0 or tokens.max() >= self.description.vocab_size:
            raise StoreError(
                f"{self.path}: row {index} holds ids {tokens.min()} to {tokens.max()}, expected 0 to "
                f"{self.description.vocab_size - 1}; delete the file and {PACKED.rewrite}"
            )
        return PackedRow(tokens, counts.astype(bool), segment_ids)

    def answer_tokens(self) -> int:
        """Counts the targets with loss in all rows; reads every row.

        Raises:
          StoreError: a row is damaged.
        """
        return sum(int(self[index].weight().sum()) for index in range(len(self)))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Checks that the rows were encoded with this tokenizer.

        Raises:
          StoreError: they were encoded with another one.
        """
        if tokenizer.digest != self.description.tokenizer:
            raise StoreError(
                f"{self.path} was packed with another tokenizer (digest {self.description.tokenizer}, "
                f"expected {tokenizer.digest}); {PACKED.rewrite} with the model's own"
            )
