"""Interface of the models under test: ``LocalReader`` runs a model here, ``EndpointReader`` asks a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import pydantic

Count = Annotated[int, pydantic.Field(ge=0)]
Seconds = Annotated[float, pydantic.Field(ge=0)]


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
      text: the answer, unchanged; empty after an error.
      prompt_tokens: tokens of the whole prompt, template and BOS included.
      seconds: time for this question; of an endpoint's first one, with the time to read the document.
      error: why there is no answer, or None.
      unfinished: why the answer stops before its end, or None.
      answer_tokens: tokens of the answer, with those of reasoning; None if they are not known.
      cached_tokens: tokens of the prompt that a server had read before; None if it does not say.
      reading_seconds: time to read the document before this question; None if it is not known apart.
    """

    text: str
    prompt_tokens: Count
    seconds: Seconds
    error: str | None = None
    unfinished: str | None = None
    answer_tokens: Count | None = None
    cached_tokens: Count | None = None
    reading_seconds: Seconds | None = None


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

    def answers(
        self, document: str, questions: Sequence[str], max_new_tokens: int
    ) -> Iterator[tuple[int, Answer]]:
        """Greedy answers with the numbers of their questions, each as soon as it is complete."""
        ...
