"""Prefix caching: the last long prompt stays encoded for later prompts with the same beginning."""

from collections.abc import Callable, Sequence

import numpy as np

from agentic_ring.inference.cached_model import array_bytes
from agentic_ring.inference.llama_programs import Tokens
from agentic_ring.inference.text_engine import Document, TextEngine


def common_prefix_length(rows: Sequence[Tokens]) -> int:
    """Returns the number of leading tokens that all rows share."""
    shortest = min(map(len, rows))
    beginnings = np.stack([np.asarray(row)[:shortest] for row in rows])
    differ = (beginnings != beginnings[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else shortest


class PrefixCache:
    """Encodes the long text before several questions only once.

    Prompts of at most one chunk are not cached: encoding them takes one step in any case.

    Attributes:
      hits: number of prompts that continued the cached text.
      misses: number of prompts that replaced it.
    """

    def __init__(self, engine: TextEngine):
        self._engine = engine
        self._tokens: Sequence[int] = ()
        self._document: Document | None = None
        self.hits = self.misses = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values, summed over all devices."""
        return 0 if self._document is None else array_bytes(self._document.cache)

    def is_short(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is not cached, as it has at most one chunk."""
        return len(prompt) <= self._engine.chunk

    def shared(self, prompt: Sequence[int]) -> int:
        """Returns how many leading tokens a prompt should take from the cached text; 0 if it should not."""
        if self.is_short(prompt) or self._document is None:
            return 0
        shared = common_prefix_length([self._tokens, prompt[:-1]])
        # Attention to a beginning takes as long as to the whole document, so it must be most of it.
        worth_it = 2 * shared >= len(self._tokens) and len(prompt) - shared <= self._engine.chunk
        return shared if worth_it else 0

    def hold(self, prompt: Sequence[int], advance: Callable[[int], None] = lambda done: None) -> int:
        """Encodes a long prompt but its last token, unless ``shared`` has most of it; returns ``shared``.

        ``advance`` reports progress, see ``TextEngine.read``.
        """
        if self.is_short(prompt):
            return 0
        shared = self.shared(prompt)
        if shared:
            self.hits += 1
            return shared
        self.misses += 1
        self._document, self._tokens = None, ()  # freed first: memory holds one document
        self._document = self._engine.read(prompt[:-1], advance)
        self._tokens = prompt[:-1]
        return len(self._tokens)

    def beginning(self, length: int) -> Document | None:
        """The first ``length`` tokens of the cached text, as encoded; None for no tokens."""
        return self._document.beginning(length) if self._document is not None and length else None

    def split(self, prompt: Sequence[int]) -> tuple[Document | None, Sequence[int]]:
        """Splits a prompt into an encoded document, or None, and the remaining tokens, at least one."""
        shared = self.hold(prompt)
        return self.beginning(shared), prompt[shared:]
