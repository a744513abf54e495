"""What a request asks of the model, and who asks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.detokenizer import AnswerText
from agentic_ring.inference.sampling import Sampling
from agentic_ring.serve.prompts import Prompt
from agentic_ring.serve.request_queue import AbandonedError

OnText = Callable[[str], None]


@dataclass(frozen=True)
class GenerationJob:
    """Prompts to answer, and how.

    Attributes:
      prompts: at least one.
      max_new_tokens: limit of each answer; 0 generates none.
      stop: strings that end an answer; they are not part of it.
      echo: put the prompt before the answer.
      scored: return log probabilities.
      continues: the answer continues the prompt's text, including the space between them; otherwise it
        is a separate text.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    echo: bool = False
    scored: bool = False
    continues: bool = True

    @property
    def is_single(self) -> bool:
        """Whether it asks for one answer and nothing else, so that it can share a batch."""
        return len(self.prompts) == 1 and self.max_new_tokens > 0 and not self.scored

    def answer_text(self, prompt: Prompt, tokenizer: Tokenizer) -> AnswerText:
        """The text of the answer to one of the prompts, before its first token."""
        return AnswerText(tokenizer.decode, prompt.tokens if self.continues else (), self.stop)


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """A job and its client.

    Attributes:
      on_text: called with each new part of the answer to a single prompt.
      has_left: whether the client has disconnected; its answer then ends.
    """

    job: GenerationJob
    on_text: OnText = lambda text: None
    has_left: Callable[[], bool] = lambda: False

    def check_connected(self) -> None:
        """Raises an AbandonedError if the client has left."""
        if self.has_left():
            raise AbandonedError
