"""Packed rows of tokens: texts of different lengths in rows of one length, their files, and their batches.

A file of packed rows is a sealed HDF5 file (``sealed_hdf5.py``) of R rows of T tokens::

    attributes     tokenizer (digest), vocab_size, template
    tokens         int32 [R, T]    0 where padding
    counts         uint8 [R, T]    1 where the prediction of the token counts in the loss
    segment_ids    int32 [R, T]    index of the token's text within the row; -1 where padding
    branches       int32 [R, T]    ``TokenizedText.branches``; absent where no text has any

``PackedRow`` derives targets, weights, positions and what tokens do not see from these.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention import MaskSpec
from agentic_ring.attention.mask import PADDING
from agentic_ring.attention.ring.layout import Layout, balanced_layout, order, padded_length
from agentic_ring.data.sealed_hdf5 import FileKind, SealedReader, write_sealed
from agentic_ring.data.sharded_batches import ShardedBatches
from agentic_ring.data.text.conversation_tokens import TokenizedText
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, DataError, StoreError
from agentic_ring.extras import needs_extra
from agentic_ring.mesh import mesh_platform
from agentic_ring.models.llama import TokenBatch

with needs_extra("text"):
    import grain
    import h5py

WINDOW_ROWS = 64
"""Number of rows that are packed together and held in memory; enough for padding below 1% unless most texts
are nearly as long as a row."""


@dataclass(frozen=True)
class PackedRow:
    """A row of several texts: the arrays [T] of a file, see the module's docstring; ``counts`` is bool."""

    tokens: np.ndarray
    counts: np.ndarray
    segment_ids: np.ndarray
    branches: np.ndarray

    def targets(self) -> np.ndarray:
        """Returns the next token within each token's text and branch, int32 [T]; 0 after the last."""
        return np.where(self._continues(), np.append(self.tokens[1:], 0), 0).astype(np.int32)

    def weight(self) -> np.ndarray:
        """Returns the loss weight of each target, float32 [T], 1 or 0."""
        return (self._continues() & np.append(self.counts[1:], False)).astype(np.float32)

    def positions(self) -> np.ndarray:
        """Returns each token's position in its text, int32 [T]; 0 where padding.

        Those of a branch follow what its text shares.
        """
        place = np.arange(len(self.tokens))
        new_text = np.diff(self.segment_ids, prepend=PADDING - 1) != 0
        new_branch = np.diff(self.branches, prepend=0) != 0

        def latest(begins: np.ndarray) -> np.ndarray:
            return np.maximum.accumulate(np.where(begins, place, 0))

        shared = latest(new_branch & (self.branches == 1)) - latest(new_text)
        position = place - latest(new_text | new_branch) + np.where(self.branches > 0, shared, 0)
        return np.where(self.segment_ids >= 0, position, 0).astype(np.int32)

    def hidden_from(self) -> np.ndarray:
        """Returns the first place in the row that does not see each token, int32 [T].

        It is the end of the token's branch; T of others, which the rest of their text sees.
        """
        length = len(self.tokens)
        ends = np.where(self._continues(), length, np.arange(1, length + 1))
        end = np.minimum.accumulate(ends[::-1])[::-1]
        return np.where(self.branches > 0, end, length).astype(np.int32)

    def _continues(self) -> np.ndarray:
        """Whether the next token belongs to the same text and branch."""
        following = np.append(self.segment_ids[1:], PADDING)
        same_branch = np.append(self.branches[1:], PADDING) == self.branches
        return (self.segment_ids >= 0) & (following == self.segment_ids) & same_branch


class RowPacker:
    """Packs whole texts into rows of ``length`` tokens, each text once.

    The method is best fit, longest first, within windows of as many texts as fill ``window_rows`` rows; the
    texts of a window's emptiest row are carried to the next. The same texts in the same order give the same
    rows.
    """

    def __init__(self, length: int, window_rows: int = WINDOW_ROWS):
        self._length = length
        self._window_tokens = window_rows * length
        self._waiting: list[TokenizedText] = []
        self._tokens = 0

    def add(self, text: TokenizedText) -> list[PackedRow]:
        """Adds a text of 1 to T tokens and returns the completed rows, if any."""
        if not 1 <= len(text) <= self._length:
            raise ArgumentError(
                f"a text has {len(text)} tokens, expected 1 to {self._length}; split or truncate it first"
            )
        self._waiting.append(text)
        self._tokens += len(text)
        if self._tokens < self._window_tokens:
            return []
        rows = _best_fit(self._waiting, self._length)
        # A window has at least as many tokens as a row, so a single row is full.
        self._waiting = rows.pop() if len(rows) > 1 else []
        self._tokens = sum(map(len, self._waiting))
        return [_row(row, self._length) for row in rows]

    def finish(self) -> list[PackedRow]:
        """Returns the rows of all texts that still wait; the packer is not used after that."""
        return [_row(row, self._length) for row in _best_fit(self._waiting, self._length)]


def _best_fit(texts: Sequence[TokenizedText], length: int) -> list[list[TokenizedText]]:
    """Puts each text, longest first, into the fullest row with room for it; the emptiest row comes last."""
    rows: list[list[TokenizedText]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for text in sorted(texts, key=len, reverse=True):
        place = bisect_left(room, (len(text), 0))
        if place == len(room):
            free, row = length, len(rows)
            rows.append([])
        else:
            free, row = room.pop(place)
        rows[row].append(text)
        insort(room, (free - len(text), row))
    return [rows[row] for _, row in room]


def _row(texts: Sequence[TokenizedText], length: int) -> PackedRow:
    padding = length - sum(map(len, texts))
    segments = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
    branches = [np.zeros(len(text), np.int32) if text.branches is None else text.branches for text in texts]
    return PackedRow(
        np.pad(np.concatenate([text.ids for text in texts]), (0, padding)),
        np.pad(np.concatenate([text.counts for text in texts]), (0, padding)),
        np.pad(segments, (0, padding), constant_values=PADDING),
        np.pad(np.concatenate(branches), (0, padding)),
    )


PACKED = FileKind(
    name="agentic_ring packed text",
    version=1,
    noun="file of packed rows",
    command="python -m data_prep.sharegpt",
    rewrite="pack the conversations again",
)
_DTYPES = {"tokens": np.int32, "counts": np.uint8, "segment_ids": np.int32, "branches": np.int32}
_CHUNK_TOKENS = 1 << 16


@dataclass(frozen=True)
class PackedDescription:
    """``Tokenizer.digest``, the size of its vocabulary, below which every id is, and the template's name."""

    tokenizer: str
    vocab_size: int
    template: str


@contextmanager
def packed_writer(
    path: Path, description: PackedDescription, length: int
) -> Iterator[Callable[[PackedRow], None]]:
    """Yields a function that adds a row to a new file, which replaces ``path`` once the block ends.

    It raises an ``ArgumentError`` for a row of another length, and an ``OSError`` on a full disk.
    """
    with write_sealed(path, PACKED) as (file, check_disk):
        file.attrs.update(asdict(description))
        chunks = {"maxshape": (None, length), "chunks": (1, min(length, _CHUNK_TOKENS))}
        # Compression is cheap: runs of equal numbers, and ids that need half their bytes.
        filters = {"compression": "gzip", "compression_opts": 1, "shuffle": True, "fletcher32": True}
        arrays: dict[str, h5py.Dataset] = {}

        def create(name: str, rows: int) -> None:
            arrays[name] = file.create_dataset(name, (rows, length), _DTYPES[name], **chunks, **filters)

        for name in _DTYPES:
            if name != "branches":
                create(name, rows=0)

        def add(row: PackedRow) -> None:
            if len(row.tokens) != length:
                raise ArgumentError(
                    f"the row has {len(row.tokens)} tokens, expected {length} as in the whole file"
                )
            if row.branches.any() and "branches" not in arrays:
                create("branches", len(arrays["tokens"]))  # zeros
            for name, array in arrays.items():
                array.resize(len(array) + 1, axis=0)
                array[-1] = getattr(row, name)
            check_disk()

        yield add


class PackedRows(SealedReader):
    """Read access to packed rows of ``length`` tokens; a context manager."""

    kind = PACKED

    def _read_tables(self) -> None:
        attributes = self._file.attrs
        size = int(np.asarray(attributes["vocab_size"]))
        self.description = PackedDescription(str(attributes["tokenizer"]), size, str(attributes["template"]))
        self._arrays: dict[str, h5py.Dataset] = {}
        self.branched = "branches" in self._file
        for name, dtype in _DTYPES.items():
            if name == "branches" and not self.branched:
                continue
            array = self._file[name]
            if not isinstance(array, h5py.Dataset) or array.dtype != dtype or array.ndim != 2:
                raise ValueError(f"{name} is no array [R, T] of {np.dtype(dtype)}")
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
            arrays = {name: array[index] for name, array in self._arrays.items()}
        except OSError as error:
            raise StoreError(
                f"{self.path}: row {index} is damaged ({error}); delete the file and {PACKED.rewrite}"
            ) from error
        tokens = arrays["tokens"]
        if tokens.min() < 0 or tokens.max() >= self.description.vocab_size:
            raise StoreError(
                f"{self.path}: row {index} holds ids {tokens.min()} to {tokens.max()}, expected 0 to "
                f"{self.description.vocab_size - 1}; delete the file and {PACKED.rewrite}"
            )
        branches = arrays.get("branches", np.zeros_like(tokens))
        return PackedRow(tokens, arrays["counts"].astype(bool), arrays["segment_ids"], branches)

    def answer_tokens(self) -> int:
        """Counts the targets with loss in all rows; reads every row."""
        return sum(int(self[index].weight().sum()) for index in range(len(self)))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises a ``StoreError`` if the rows were encoded with another tokenizer."""
        if tokenizer.digest != self.description.tokenizer:
            raise StoreError(
                f"{self.path} was packed with another tokenizer (digest {self.description.tokenizer}, "
                f"expected {tokenizer.digest}); {PACKED.rewrite} with the model's own"
            )


class PackedBatches(ShardedBatches):
    """An endless iterator of ``TokenBatch``, rows over data and fsdp, tokens over the ring in balanced order.

    Every row occurs once per epoch, in an order that depends on the seed but not on the mesh. A batch's
    weight is one global array: its sum is the number of answer tokens on all devices and processes, by which
    ``training.train_step.make_train_step`` divides.

    Args:
      batch_size: number of rows, over all processes.
      seed: seed of the order of the rows.

    Raises:
      DataError: there are no rows, or their length does not divide evenly over the ring.
    """

    def __init__(self, rows: PackedRows, batch_size: int, mesh: Mesh, seed: int = 0):
        ring = mesh.shape["ring"]
        on_device, platform = rows.length // ring, mesh_platform(mesh)
        self._layout: Layout = balanced_layout(MaskSpec(), True, ring, on_device, platform)
        if not len(rows):
            raise DataError(f"{rows.path} has no rows; pack more conversations, or shorter rows")
        needed = padded_length(rows.length, ring, self._layout)
        if needed != rows.length:
            raise DataError(
                f"the rows of {rows.path} have {rows.length} tokens, which do not divide evenly over a ring "
                f"of {ring} in {self._layout} order; pack rows of {needed}, or use a smaller ring"
            )
        places = order(self._layout, rows.length, ring)
        shuffled = grain.MapDataset.range(len(rows)).shuffle(seed=seed).repeat()

        def load(number: int, columns: np.ndarray) -> dict[str, np.ndarray]:
            row = rows[cast(int, shuffled[number])]
            fields = {
                "tokens": row.tokens,
                "targets": row.targets(),
                "weight": row.weight(),
                "positions": row.positions(),
                "segment_ids": row.segment_ids,
            }
            if rows.branched:
                fields["hidden_from"] = row.hidden_from()
            return {name: array[places[columns]] for name, array in fields.items()}

        super().__init__(load, batch_size, rows.length, mesh)

    def __next__(self) -> TokenBatch:
        """Returns the next batch, on the devices."""
        return TokenBatch(**self.next_fields(), layout=self._layout)
