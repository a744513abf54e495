"""The text that was read last, kept for prompts that begin as it does."""

from collections.abc import Callable, Sequence

from agentic_ring.inference.ragged import shared_beginning
from agentic_ring.inference.text import Document, TextEngine


class LastDocument:
    """Many questions about one long text, each with the whole text before it, cost one reading.

    Prompts of up to a chunk are not kept: reading them takes one step in any case.
    """

    def __init__(self, engine: TextEngine):
        self._engine = engine
        self._tokens: Sequence[int] = ()
        self._document: Document | None = None

    def split(
        self, prompt: Sequence[int], advance: Callable[[int], None] = lambda done: None
    ) -> tuple[Document | None, Sequence[int]]:
        """What of the prompt has been read, after reading it if need be, and what is left of it.

        At least one token is left. ``advance`` is that of ``TextEngine.read``.
        """
        if len(prompt) <= self._engine.chunk:
            return None, prompt
        shared = shared_beginning([self._tokens, prompt[:-1]])
        # A beginning is read in the time of the whole document, so it must be most of it.
        worth_it = 2 * shared >= len(self._tokens) and len(prompt) - shared <= self._engine.chunk
        if self._document is None or not worth_it:
            self._document, self._tokens = None, ()  # gone before another is read: memory holds one
            shared = len(prompt) - 1
            self._document = self._engine.read(prompt[:shared], advance)
            self._tokens = prompt[:shared]
        return self._document.beginning(shared), prompt[shared:]
