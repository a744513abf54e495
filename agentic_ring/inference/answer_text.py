"""The text of an answer, token by token."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_CONTEXT = 8
"""Tokens that are decoded before a new one. Some decoders drop the space of what comes first."""

_MOST_HELD = 3
"""Tokens that may have to be waited for: in UTF-8 a character has up to 4 bytes."""

_HALF_A_CHARACTER = "\ufffd"


class TextPieces:
    """What each token adds to the text; a character in several tokens comes with the last of them.

    Args:
      decode: ids to text.
      before: the tokens that stand before; none where the text is to begin without a space of its own.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(before[-_CONTEXT:])
        self._shown = decode(self._tokens)
        self._held = 0

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_HALF_A_CHARACTER) and self._held < _MOST_HELD:
            self._held += 1
            return ""
        return self._show(text)

    def rest(self) -> str:
        """What is left when no token follows."""
        return self._show(self._decode(self._tokens))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._tokens = self._tokens[-_CONTEXT:]
        self._shown = self._decode(self._tokens)
        self._held = 0
        return piece


class UntilStop:
    """Hands a text on up to the stop string that ends first; what may become one waits.

    Attributes:
      stopped: whether one was met.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = [string for string in strings if string]
        self._waiting = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What of the text so far is certain to be part of the answer and was not handed on yet."""
        shown = ""
        # Letter by letter: what comes out does not depend on how the text was cut up.
        for letter in text:
            if self.stopped:
                break
            self._waiting += letter
            met = [len(string) for string in self._strings if self._waiting.endswith(string)]
            self.stopped = bool(met)
            shown += self._hand_on(len(self._waiting) - (max(met) if met else self._begun()))
        return shown

    def rest(self) -> str:
        """What is left when no text follows."""
        return "" if self.stopped else self._hand_on(len(self._waiting))

    def _begun(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
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
    """``TextPieces`` and ``UntilStop`` together.

    Attributes:
      text: of the answer so far.
    """

    def __init__(self, decode: Decode, before: Sequence[int], strings: Sequence[str]):
        self._pieces = TextPieces(decode, before)
        self._until = UntilStop(strings)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._until.stopped

    def add(self, token: int) -> str:
        """What the token adds to the answer."""
        return self._grow(self._until.add(self._pieces.add(token)))

    def rest(self) -> str:
        """What is left when no token follows."""
        return self._grow(self._until.add(self._pieces.rest()) + self._until.rest())

    def _grow(self, text: str) -> str:
        self.text += text
        return text
