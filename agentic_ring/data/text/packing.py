"""Packs texts of different lengths into rows of one length with little padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentic_ring.attention.mask import PADDING
from agentic_ring.data.text.conversation_tokens import TokenizedText
from agentic_ring.errors import ArgumentError

WINDOW_ROWS = 64
"""Number of rows that are packed together and held in memory; enough for padding below 1% unless most texts
are nearly as long as a row."""


@dataclass(frozen=True)
class PackedRow:
    """A row of several texts, [T].

    Attributes:
      tokens: int32, 0 where padding.
      counts: bool, whether the prediction of this token counts in the loss.
      segment_ids: int32, index of each token's text within the row; negative for padding.
    """

    tokens: np.ndarray
    counts: np.ndarray
    segment_ids: np.ndarray

    def targets(self) -> np.ndarray:
        """Returns the next token within each token's text, int32 [T]; 0 after the last."""
        return np.where(self._continues(), np.append(self.tokens[1:], 0), 0).astype(np.int32)

    def weight(self) -> np.ndarray:
        """Returns the loss weight of each target, float32 [T], 1 or 0."""
        return (self._continues() & np.append(self.counts[1:], False)).astype(np.float32)

    def positions(self) -> np.ndarray:
        """Returns each token's position in its text, int32 [T]; 0 where padding."""
        place = np.arange(len(self.tokens), dtype=np.int32)
        begins = np.diff(self.segment_ids, prepend=PADDING - 1) != 0
        start = np.maximum.accumulate(np.where(begins, place, 0))
        return np.where(self.segment_ids >= 0, place - start, 0).astype(np.int32)

    def _continues(self) -> np.ndarray:
        """Whether the next token belongs to the same text."""
        following = np.append(self.segment_ids[1:], PADDING)
        return (self.segment_ids >= 0) & (following == self.segment_ids)


class RowPacker:
    """Packs whole texts into rows, each text once.

    The method is best fit, longest first, within windows of as many texts as fill ``window_rows`` rows; the
    texts of a window's emptiest row are carried to the next. The same texts in the same order give the same
    rows.

    Args:
      length: row length in tokens, T.
      window_rows: number of rows to fill at a time.
    """

    def __init__(self, length: int, window_rows: int = WINDOW_ROWS):
        if length < 1 or window_rows < 1:
            raise ArgumentError(f"length and window_rows must be at least 1, got {length} and {window_rows}")
        self._length = length
        self._window_tokens = window_rows * length
        self._waiting: list[TokenizedText] = []
        self._tokens = 0

    def add(self, text: TokenizedText) -> list[PackedRow]:
        """Adds a text of 1 to T tokens and returns the completed rows, if any.

        Raises:
          ArgumentError: the text is empty or longer than a row.
        """
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
        """Returns the rows of all texts that still wait."""
        rows = _best_fit(self._waiting, self._length)
        self._waiting, self._tokens = [], 0
        return [_row(row, self._length) for row in rows]


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
    return PackedRow(
        np.pad(np.concatenate([text.ids for text in texts]), (0, padding)),
        np.pad(np.concatenate([text.counts for text in texts]), (0, padding)),
        np.pad(segments, (0, padding), constant_values=PADDING),
    )
