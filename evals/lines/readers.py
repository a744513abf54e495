"""Interface of the models under test: ``LocalReader`` runs a model here, ``EndpointReader`` asks a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
      text: the answer; empty after an error.
      prompt_tokens: tokens of the whole prompt, template and BOS included.
      seconds: time for this question; the first one includes the time to read the document.
      error: why there is no answer, or None.
    """

    text: str
    prompt_tokens: int
    seconds: float
    error: str | None = None


class Reader(Protocol):
    """A model that reads a document and answers questions about it."""

    @property
    def name(self) -> str:
        """Name of the model in tables and plots."""
        ...

    @property
    def trained_on_task(self) -> bool:
        """Whether the model was trained on line retrieval itself, so that its results are marked."""
        ...

    def count_tokens(self, document: str, question: str) -> int:
        """Tokens of the prompt with this document and question, including the model's template."""
        ...

    def answers(self, document: str, questions: Sequence[str], max_new_tokens: int) -> Iterator[Answer]:
        """Greedy answers in the order of the questions, each as soon as it is complete."""
        ...
