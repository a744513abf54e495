"""Incremental detokenisation: the text of an answer token by token, up to its stop string.

An answer ends before the stop string that is complete first; of several that end with the same character, the
longest counts. That refers to the answer's text, however it is divided into tokens or events.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import takewhile
from operator import eq

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import Completion, Document, TextEngine, Tokens

_CONTEXT = 8
"""Earlier tokens that are decoded together with a new one, since some decoders drop a leading space."""


class IncrementalDetokenizer:
    """Decodes one token at a time; the pieces add up to the text of all tokens, whatever they are.

    A character of several tokens is returned with the last of them. Where a vocabulary spells rare characters
    by their bytes (LLaMA 1 and 2), a run of bytes is returned with the token after it, since a byte that fits
    no character changes all of its run.

    Args:
      before: preceding tokens; empty if the text starts on its own, without a leading space.
      skip_special: whether special tokens add no text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), skip_special: bool = True):
        self._decode = partial(tokenizer.decode, skip_special=skip_special)
        self._tokenizer = tokenizer
        self._left_out = tokenizer.special_ids if skip_special else frozenset()
        self._keep(before)

    def add(self, token: int) -> str:
        """Returns the text that is complete with this token and was not before."""
        if self._is_silent(token):
            return ""
        self._tokens.append(token)
        if token in self._tokenizer.byte_ids:
            return ""
        text = self._decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._show(text)

    def rest(self) -> str:
        """Returns the text held back at the end of the answer."""
        return self._show(self._decode(self._tokens))

    def _show(self, text: str) -> str:
        # More may have changed than its end, where the text before stops within a character.
        same = sum(1 for _ in takewhile(bool, map(eq, self._shown, text)))
        self._keep(self._tokens)
        return text[same:]

    def _keep(self, tokens: Sequence[int]) -> None:
        """Forgets tokens but for the last ones, and those of a run of bytes that these would cut."""
        start, of_bytes = max(0, len(tokens) - _CONTEXT), self._tokenizer.byte_ids
        while start and (tokens[start] in of_bytes or self._is_silent(tokens[start])):
            start -= 1
        self._tokens = list(tokens[start:])
        self._shown = self._decode(self._tokens)

    def _is_silent(self, token: int) -> bool:
        """Whether decoding leaves the token out; the bytes on both sides of it may form a character."""
        return token in self._left_out or self._tokenizer.token(token) is None


class AnswerText:
    """The text of one answer, token by token; ``completion`` is set at its end.

    It continues the tokens ``before``, and ends at one of the ``strings`` or ``ends``. A string that spells a
    special token, which adds no text, means that token.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], strings: Sequence[str], ends: Collection[int]
    ):
        self._pieces = IncrementalDetokenizer(tokenizer, before)
        self._until = StopStringFilter(strings)
        spelled = map(tokenizer.token_id, map(str.strip, strings))
        self.stop_tokens = tokenizer.special_ids.intersection(spelled).union(ends)
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
    """Generates the ``answers`` to tokenised ``prompts`` up to one of their stop strings or tokens.

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
        stop_tokens=[answer.stop_tokens for answer in answers],
        on_token=stops,
        on_end=end,
        least_rows=least_rows,
    )


class StopStringFilter:
    """Passes text on up to the first stop string; a possible beginning of one is held back.

    ``stopped`` tells whether a stop string was found.
    """

    def __init__(self, strings: Sequence[str]):
        self._automaton = _automaton(tuple(filter(None, strings)))
        self._state = 0
        self._waiting: deque[str] = deque()
        self.stopped = False

    def add(self, text: str) -> str:
        """Returns the text that certainly belongs to the answer and was not returned before."""
        shown = []
        for letter in text:
            if self.stopped:
                break
            self._state = self._automaton.after(self._state, letter)
            self._waiting.append(letter)
            found = self._automaton.found[self._state]
            while len(self._waiting) > (found or self._automaton.length[self._state]):
                shown.append(self._waiting.popleft())
            self.stopped = found > 0
        return "".join(shown)

    def rest(self) -> str:
        """Returns the text held back at the end of the answer."""
        text = "" if self.stopped else "".join(self._waiting)
        self._waiting.clear()
        return text


class _Automaton:
    """The automaton of Aho and Corasick (1975), which searches for all strings at once.

    Its state is the longest beginning of a string with which the text ends.

    Attributes:
      length: characters of each state's beginning.
      found: length of the longest string with which that ends; 0 if there is none.
    """

    def __init__(self, strings: tuple[str, ...]):
        self.length = [0]
        self.found = [0]
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # state of the longest beginning with which that of this state ends
        for string in strings:
            state = 0
            for length, letter in enumerate(string, start=1):
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self.length.append(length)
                    self.found.append(0)
                    self._shorter.append(0)
                state = self._next[state][letter]
            self.found[state] = len(string)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for letter, longer in self._next[state].items():
                self._shorter[longer] = self.after(self._shorter[state], letter)
                self.found[longer] = self.found[longer] or self.found[self._shorter[longer]]
                waiting.append(longer)

    def after(self, state: int, letter: str) -> int:
        """Returns the state after one more letter."""
        while state and letter not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(letter, 0)


# All answers of a request have the same strings.
_automaton = lru_cache(maxsize=1)(_Automaton)
