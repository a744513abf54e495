"""Requests that are answered together."""

from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.serve.jobs import GenerationRequest


class RequestBatch:
    """Requests for single answers whose prompts share a cached beginning, or are all short.

    Args:
      prefixes: holds the beginning.
      rows: maximum number of requests.
      slots: maximum number of tokens of ``rows`` rests of prompts with their answers, so that a batch needs
        no more memory than one prompt of that length; only the first request may exceed it, alone.

    Attributes:
      requests: the requests so far.
      shared: number of leading tokens that their prompts share with the cached text; 0 for short prompts.
    """

    def __init__(self, prefixes: PrefixCache, rows: int, slots: int):
        self._prefixes = prefixes
        self._rows = rows
        self._slots = slots
        self._longest_prompt = self._longest_answer = 0
        self.requests: list[GenerationRequest] = []
        self.shared = 0

    def start(self, request: GenerationRequest) -> None:
        """Adds the first request, after the cache has encoded its prompt.

        Raises:
          AbandonedError: its client left before.
        """
        tokens = request.job.prompts[0].tokens
        shared = self._prefixes.hold(tokens, lambda done: request.check_connected())
        self._add(request, shared)

    def admit(self, request: GenerationRequest) -> bool:
        """Adds a request if it fits to the others; returns whether it does."""
        if not request.job.is_single or len(self.requests) == self._rows:
            return False
        tokens = request.job.prompts[0].tokens
        shared = self._prefixes.shared(tokens)
        if bool(shared) != bool(self.shared) or not (shared or self._prefixes.is_short(tokens)):
            return False
        rest = max(self._longest_prompt, len(tokens)) - min(self.shared, shared)
        if self._rows * (rest + max(self._longest_answer, request.job.max_new_tokens)) > self._slots:
            return False
        self._add(request, self._prefixes.hold(tokens))
        return True

    def _add(self, request: GenerationRequest, shared: int) -> None:
        self.shared = min(self.shared, shared) if self.requests else shared
        self._longest_prompt = max(self._longest_prompt, len(request.job.prompts[0].tokens))
        self._longest_answer = max(self._longest_answer, request.job.max_new_tokens)
        self.requests.append(request)
