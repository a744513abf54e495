"""Incremental detokenisation: the text of an answer token by token, up to its stop string.

An answer ends before the stop string that is complete first; of several that end with the same character, the
longest counts. That refers to the answer's text, however it is divided into tokens or events.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import Completion, Document, TextEngine, Tokens

Decode = Callable[[Sequence[int]], str]
_CONTEXT = 8
"""Earlier tokens that are decoded together with a new one, since some decoders drop a leading space."""
_MOST_HELD = 3
"""Tokens that may be held back until a character is complete: in UTF-8 it has up to 4 bytes."""


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
        if text.endswith("\ufffd") and self._held < _MOST_HELD:
            self._held += 1
            return ""
        return self._show(text)

    def rest(self) -> str:
        """Returns the text held back at the end of the answer."""
        return self._show(self._decode(self._tokens))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._tokens, self._held = self._tokens[-_CONTEXT:], 0
        self._shown = self._decode(self._tokens)
        return piece


class AnswerText:
    """The text of one answer, token by token; ``completion`` is set at its end."""

    def __init__(self, decode: Decode, before: Sequence[int], strings: Sequence[str]):
        self._pieces = IncrementalDetokenizer(decode, before)
        self._until = StopStringFilter(strings)
        self._parts: list[str] = []
        self.completion = Completion()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._until.stopped

    def add(self, token: int) -> str:
        """Returns the text that the token adds to the answer."""
        self._parts.append(self._until.add(self._pieces.add(token)))
        return self._parts[-1]

    def end(self, completion: Completion) -> str:
        """Returns the text held back at the end of the answer, in which a stop string may be found."""
        self._parts.append(self._until.add(self._pieces.rest()) + self._until.rest())
        self.completion = replace(completion, ended="stop") if self.stopped else completion
        return self._parts[-1]


def generate_answers(
    engine: TextEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[Tokens],
    answers: Sequence[AnswerText],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling],
    *,
    document: Document | None = None,
    on_text: Callable[[int, str], object] = lambda row, text: None,
    on_end: Callable[[int, AnswerText], object] = lambda row, answer: None,
    least_rows: int = 1,
) -> None:
    """Generates the ``answers`` to tokenised ``prompts`` up to one of their stop strings or an end token.

    ``on_text`` is called with the index of an answer and each new part of it, which may be empty; the answer
    ends there if the call returns true. Other arguments and errors are those of ``TextEngine.generate``.
    """

    def stops(row: int, token: int) -> bool:
        left = on_text(row, answers[row].add(token))
        return bool(left) or answers[row].stopped

    def end(row: int, completion: Completion) -> None:
        on_text(row, answers[row].end(completion))
        on_end(row, answers[row])

    engine.generate(
        prompts,
        max_new_tokens,
        document=document,
        sampling=sampling,
        stop_tokens=tokenizer.eos_ids,
        on_token=stops,
        on_end=end,
        least_rows=least_rows,
    )


class StopStringFilter:
    """Passes text on up to the first stop string, which ends it; a possible beginning of one is held back."""

    def __init__(self, strings: Sequence[str]):
        self._strings = _with_borders(tuple(filter(None, strings)))
        self._begun = [0] * len(self._strings)  # characters of each string with which the text ends
        self._waiting: deque[str] = deque()
        self.stopped = False

    def add(self, text: str) -> str:
        """Returns the text that certainly belongs to the answer and was not returned before."""
        shown = []
        for letter in text:
            if self.stopped:
                break
            self._waiting.append(letter)
            found = 0
            for number, (string, borders) in enumerate(self._strings):
                begun = self._begun[number]
                while begun and string[begun] != letter:
                    begun = borders[begun]
                self._begun[number] = begun = begun + (string[begun] == letter)
                if begun == len(string):
                    found = max(found, begun)
            while len(self._waiting) > (found or max(self._begun, default=0)):
                shown.append(self._waiting.popleft())
            self.stopped = found > 0
        return "".join(shown)

    def rest(self) -> str:
        """Returns the text held back at the end of the answer."""
        text = "" if self.stopped else "".join(self._waiting)
        self._waiting.clear()
        return text


@lru_cache(maxsize=1)  # all answers of a request have the same strings
def _with_borders(strings: tuple[str, ...]) -> list[tuple[str, list[int]]]:
    """Each string with its borders, for the search of Knuth, Morris and Pratt (1977).

    The border of the first n characters is the length of the longest shorter beginning with which they end.
    """
    found = []
    for string in strings:
        borders, length = [0, 0], 0
        for letter in string[1:]:
            while length and string[length] != letter:
                length = borders[length]
            length += string[length] == letter
            borders.append(length)
        found.append((string, borders))
    return found
