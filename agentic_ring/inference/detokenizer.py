"""Incremental detokenisation: the text of an answer token by token, up to its stop string."""

from collections.abc import Callable, Sequence

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import Completion, Document, TextEngine, Tokens, stop_at

Decode = Callable[[Sequence[int]], str]

_CONTEXT = 8
"""Earlier tokens that are decoded together with a new one, since some decoders drop a leading space."""

_MOST_HELD = 3
"""Tokens that may be held back until a character is complete: in UTF-8 it has up to 4 bytes."""

_INCOMPLETE_CHARACTER = "\ufffd"


class IncrementalDetokenizer:
    """Decodes one token at a time; a character of several tokens is returned with the last of them.

    Args:
      before: preceding tokens; empty if the text starts on its own, without a leading space.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(before[-_CONTEXT:])
        self._shown = decode(self._tokens)
        self._held = 0

    def add(self, token: int) -> str:
        """Returns the text that is complete with this token and was not before."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_INCOMPLETE_CHARACTER) and self._held < _MOST_HELD:
            self._held += 1
            return ""
        return self._show(text)

    def rest(self) -> str:
        """Returns the text held back at the end of the answer."""
        return self._show(self._decode(self._tokens))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._tokens = self._tokens[-_CONTEXT:]
        self._shown = self._decode(self._tokens)
        self._held = 0
        return piece


class StopStringFilter:
    """Passes text on up to the first stop string; a possible beginning of one is held back.

    ``stopped`` tells whether a stop string was found.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = [string for string in strings if string]
        self._waiting = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Returns the text that certainly belongs to the answer and was not returned before."""
        shown = ""
        # Character by character, so that the result does not depend on how the text was split.
        for letter in text:
            if self.stopped:
                break
            self._waiting += letter
            met = [len(string) for string in self._strings if self._waiting.endswith(string)]
            self.stopped = bool(met)
            shown += self._hand_on(len(self._waiting) - (max(met) if met else self._begun()))
        return shown

    def rest(self) -> str:
        """Returns the text held back at the end of the answer."""
        return "" if self.stopped else self._hand_on(len(self._waiting))

    def _begun(self) -> int:
        """Number of characters at the end that may be the beginning of a stop string."""
        lengths = (
            length
            for string in self._strings
            for length in range(1, len(string))
            if self._waiting.endswith(string[:length])
        )
        return max(lengths, default=0)

    def _hand_on(self, length: int) -> str:
        text, self._waiting = self._waiting[:length], self._waiting[length:]
        return text


class AnswerText:
    """The ``text`` of one answer so far: ``IncrementalDetokenizer``, then ``StopStringFilter``."""

    def __init__(self, decode: Decode, before: Sequence[int], strings: Sequence[str]):
        self._pieces = IncrementalDetokenizer(decode, before)
        self._until = StopStringFilter(strings)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._until.stopped

    def add(self, token: int) -> str:
        """Returns the text that the token adds to the answer."""
        return self._grow(self._until.add(self._pieces.add(token)))

    def rest(self) -> str:
        """Returns the text held back at the end of the answer."""
        return self._grow(self._until.add(self._pieces.rest()) + self._until.rest())

    def _grow(self, text: str) -> str:
        self.text += text
        return text


def generate_answers(
    engine: TextEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[Tokens],
    answers: Sequence[AnswerText],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    *,
    document: Document | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> list[Completion]:
    """Generates the ``answers`` to tokenised ``prompts`` up to a stop string or an end-of-text token.

    ``on_text`` is called with each new part of any answer. Raises what ``TextEngine.generate`` raises.
    """
    completions = engine.generate(
        prompts,
        max_new_tokens,
        document=document,
        sampling=sampling,
        stop_tokens=tokenizer.eos_ids,
        stop=stop_at(stop, tokenizer.decode),
        on_token=lambda row, token: on_text(answers[row].add(token)),
    )
    for answer in answers:
        on_text(answer.rest())
    return completions
