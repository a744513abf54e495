"""Texts of different lengths as arrays of a few sizes, because every size is a program to compile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agentic_ring.attention.cache import EMPTY_SLOT

Tokens = Sequence[int]


def bucket(length: int, unit: int, steps: int = 8) -> int:
    """The smallest size that holds ``length``.

    Sizes are multiples of ``unit``, and from ``steps`` units on there are ``steps`` of them from one power
    of two to the next, so that a size exceeds its length by a unit or by 1 / ``steps`` at most.
    """
    units = max(1, -(-length // unit))
    step = max(1, 2 ** (units - 1).bit_length() // (2 * steps))
    return unit * step * -(-units // step)


def shared_beginning(rows: Sequence[Tokens]) -> int:
    """Tokens that all rows begin with."""
    shortest = min(map(len, rows))
    beginnings = np.array([row[:shortest] for row in rows])
    differ = (beginnings != beginnings[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else shortest


@dataclass(frozen=True)
class Piece:
    """The same places of all rows.

    Attributes:
      first: the first of these places.
      tokens: int32 [B, C].
      targets: int32 [B, C], the token after each; 0 after a row's last.
      positions: int32 [B, C]; ``EMPTY_SLOT`` where a row has no token.
      place_of_last: int32 [B], of each row's last token within the piece; outside of it for the others.
    """

    first: int
    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    place_of_last: np.ndarray

    @property
    def size(self) -> int:
        """Tokens of a row, C."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Ragged:
    """Rows of tokens, to be worked on piece by piece.

    Attributes:
      rows: may be empty.
      start: position of every row's first token.
      chunk: tokens of a piece.
      unit: the last piece is a multiple of this.
    """

    rows: Sequence[Tokens]
    start: int
    chunk: int
    unit: int

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [B]."""
        return np.array([len(row) for row in self.rows], np.int32)

    @property
    def sizes(self) -> list[int]:
        """Of each piece: whole chunks, and what is left in a bucket of its own."""
        whole, rest = divmod(int(self.lengths.max()), self.chunk)
        return [self.chunk] * whole + ([min(bucket(rest, self.unit, steps=2), self.chunk)] if rest else [])

    def pieces(self) -> Iterator[Piece]:
        """All pieces in order."""
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
            yield Piece(first, tokens, targets, positions, self.lengths - 1 - first)
            first += size
