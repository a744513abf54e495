"""A tokenizer that encodes only the end of a text that begins like the last long one.

Requests about one document repeat it, and encoding half a million tokens takes seconds.
"""

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.extras import needs_extra

with needs_extra("text"):
    import tokenizers

LONG_TEXT = 16_384
"""Characters from which a text is remembered."""

MARGIN = 4096
"""Characters after a word that may decide where the word ends: those that both texts have after the place
from which the second one is encoded."""


class RememberingTokenizer(Tokenizer):
    """The same tokens as ``Tokenizer``'s, in less time for a text that begins like an earlier one.

    Tokenizers encode each word on its own, but for those that divide no text into words: these encode each
    text as a whole here, too. A tokenizer whose words depend on what stands before them is noticed.
    """

    _text = ""
    _encoding: tokenizers.Encoding | None = None

    def _ids(self, text: str) -> list[int]:
        if len(text) < LONG_TEXT:
            return super()._ids(text)
        ids = self._continued(text)
        if ids is None:
            self._text, self._encoding = text, self._backend.encode(text, add_special_tokens=False)
            ids = self._encoding.ids
        return ids

    def _continued(self, text: str) -> list[int] | None:
        """The tokens, from those of the remembered text; None if the two share too little."""
        if self._encoding is None:
            return None
        token, first = self._word_before(_common_characters(self._text, text) - MARGIN)
        if 2 * first < len(text):
            return None
        ids = self._encoding.ids
        if super()._ids(self._text[first:]) != ids[token:]:
            return None
        return ids[:token] + super()._ids(text[first:])

    def _word_before(self, place: int) -> tuple[int, int]:
        """The first token and character of the remembered text's last word that begins before ``place``.

        Both are 0 if there is none.
        """
        encoding = self._encoding
        assert encoding is not None, "a text is remembered"
        token = encoding.char_to_token(place) if place > 0 else None
        word = None if token is None else encoding.token_to_word(token)
        tokens = None if word is None else encoding.word_to_tokens(word)
        # Offsets of a word may leave out the space before it; what the word before has left is complete.
        before = encoding.token_to_chars(tokens[0] - 1) if tokens and tokens[0] else None
        return (0, 0) if tokens is None or before is None else (tokens[0], before[1])


def _common_characters(one: str, other: str) -> int:
    """Number of leading characters that two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
