"""Prompts of requests: their size limit, chat template and tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentic_ring.data.text.chat import ChatTemplate, Turn, check_special_tokens
from agentic_ring.data.text.conversation_tokens import encode_pieces, prompt_pieces
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, DataError

TOKENS = "i"
"""Type of the arrays of a prompt's tokens: int32, many of which are compared faster than lists."""


class ContextLengthError(ArgumentError):
    """A prompt and its answer exceed the maximum context."""


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
      text: the given text, or the decoded tokens; empty for a chat, which is never echoed.
      added: number of leading tokens that the tokenizer added, such as the beginning-of-text token.
    """

    tokens: Sequence[int]
    text: str
    added: int = 0


@dataclass(frozen=True)
class PromptLimits:
    """Limits that hold before a prompt is encoded, so that encoding takes bounded time.

    Attributes:
      tokens: maximum context.
      characters: maximum number of characters of a prompt: ``tokens`` times the longest token's.
    """

    tokens: int
    characters: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_context: int) -> "PromptLimits":
        """The limits of a context of ``max_context`` tokens of this tokenizer."""
        return cls(max_context, max_context * tokenizer.longest_token)

    def check_texts(self, texts: Iterable[str]) -> None:
        """Checks the characters of each text.

        Raises:
          ContextLengthError: one has more than the context could hold.
        """
        for text in texts:
            self._check(len(text))

    def check_chat(self, turns: Sequence[Turn]) -> None:
        """Checks a conversation's number of messages and of characters.

        Raises:
          ContextLengthError: it has more than the context could hold.
        """
        if len(turns) > self.tokens:
            raise ContextLengthError(
                f"the chat has {len(turns)} messages; the context holds {self.tokens} tokens"
            )
        self._check(sum(len(turn.text) for turn in turns))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Checks a tokenised prompt.

        Raises:
          ContextLengthError: it has more tokens than the context.
        """
        if len(tokens) > self.tokens:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; prompt and answer together may be {self.tokens}"
            )

    def _check(self, characters: int) -> None:
        if characters > self.characters:
            raise ContextLengthError(
                f"the prompt has {characters} characters; the context of {self.tokens} tokens holds at most "
                f"{self.characters}"
            )


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts of one model; with no template, there are no chats."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    limits: PromptLimits

    def check_template(self) -> None:
        """Checks that the tokenizer has the special tokens that the template writes.

        Raises:
          DataError: it lacks one.
        """
        if self.template is not None:
            check_special_tokens(self.template, self.tokenizer)

    def text(self, text: str) -> Prompt:
        """Tokenises a text.

        Raises:
          ContextLengthError: it has more characters than the context could hold.
        """
        self.limits.check_texts([text])
        tokens = self.tokenizer.encode_prompt(text)
        return Prompt(tokens, text, added=len(tokens) - len(self.tokenizer.encode(text)))

    def chat(self, turns: Sequence[Turn]) -> Prompt:
        """Tokenises a conversation that ends with the user's turn, in the template of the model's training.

        Raises:
          DataError: the turns do not form such a conversation, or there is no template.
          ContextLengthError: it has more characters than the context could hold.
        """
        if self.template is None:
            raise DataError("the model's folder has no chat template; start the server with --template")
        self.limits.check_chat(turns)
        pieces = prompt_pieces(self.tokenizer, self.template, turns)
        self.limits.check_texts(["".join(piece.text for piece in pieces)])
        return Prompt([token for ids in encode_pieces(self.tokenizer, pieces) for token in ids], "")
