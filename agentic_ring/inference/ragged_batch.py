"""Batches of token sequences of different lengths, padded to few sizes, since each size is compiled once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agentic_ring.attention.cache import EMPTY_SLOT

Tokens = Sequence[int]


def bucket_size(length: int, unit: int, steps: int = 8) -> int:
    """Returns the smallest bucket size that holds ``length``.

    Sizes are multiples of ``unit``. From ``steps`` units on there are ``steps`` sizes between consecutive
    powers of two, so that a size exceeds its length by at most one unit or by 1 / ``steps``.
    """
    units = max(1, -(-length // unit))
    step = max(1, 2 ** (units - 1).bit_length() // (2 * steps))
    return unit * step * -(-units // step)


def common_prefix_length(rows: Sequence[Tokens]) -> int:
    """Returns the number of leading tokens that all rows share."""
    shortest = min(map(len, rows))
    beginnings = np.stack([np.asarray(row)[:shortest] for row in rows])
    differ = (beginnings != beginnings[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else shortest


@dataclass(frozen=True)
class BatchChunk:
    """The same C columns of all rows.

    Attributes:
      first: index of the first column.
      tokens: int32 [B, C].
      targets: int32 [B, C], the token after each; 0 after the last token of a row.
      positions: int32 [B, C]; ``EMPTY_SLOT`` for padding.
      place_of_last: int32 [B], column of each row's last token in this chunk; out of range if elsewhere.
    """

    first: int
    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    place_of_last: np.ndarray

    @property
    def size(self) -> int:
        """Columns, C."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class RaggedBatch:
    """Rows of tokens, divided into chunks of columns.

    Attributes:
      rows: token sequences; some may be empty.
      start: position of the first token of every row.
      chunk: columns per chunk.
      unit: the size of the last chunk is a multiple of this.
    """

    rows: Sequence[Tokens]
    start: int
    chunk: int
    unit: int

    @cached_property
    def lengths(self) -> np.ndarray:
        """Length of each row, int32 [B]."""
        return np.array([len(row) for row in self.rows], np.int32)

    @property
    def sizes(self) -> list[int]:
        """Columns of each chunk: full chunks, then the rest rounded up to a bucket."""
        whole, rest = divmod(int(self.lengths.max()), self.chunk)
        return [self.chunk] * whole + (
            [min(bucket_size(rest, self.unit, steps=2), self.chunk)] if rest else []
        )

    def chunks(self) -> Iterator[BatchChunk]:
        """All chunks in order."""
        first = 0
        for size in self.sizes:
            shape = len(self.rows), size
            tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            positions = np.full(shape, EMPTY_SLOT, np.int32)
            for number, row in enumerate(self.rows):
                part, after = row[first : first + size], row[first + 1 : first + 1 + size]
                tokens[number, : len(part)] = part
                targets[number, : len(after)] = after
                positions[number, : len(part)] = self.start + first + np.arange(len(part))
            yield BatchChunk(first, tokens, targets, positions, self.lengths - 1 - first)
            first += size
