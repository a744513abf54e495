"""Who reads a document and answers questions about it: a model of ours, or one behind an address."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """What came back for one question.

    Attributes:
      text: the answer; empty where there was an error.
      prompt_tokens: of the whole prompt, template and BOS included.
      seconds: that this question took; reading the document counts for the first one asked.
      error: why there is no answer, or None.
    """

    text: str
    prompt_tokens: int
    seconds: float
    error: str | None = None


class Reader(Protocol):
    """Reads documents and answers questions."""

    @property
    def name(self) -> str:
        """Of the model, for tables and plots."""
        ...

    @property
    def trained_on_task(self) -> bool:
        """Whether it was trained on line retrieval itself, so that its results stand apart."""
        ...

    def count_tokens(self, document: str, question: str) -> int:
        """Tokens of the prompt that holds both, with all that the model's template puts around them."""
        ...

    def answers(self, document: str, questions: Sequence[str], max_new_tokens: int) -> Iterator[Answer]:
        """Greedy answers, one for each question and in their order, each as soon as it is there."""
        ...
