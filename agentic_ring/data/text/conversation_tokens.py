"""Tokenizes conversations and marks the tokens with loss: the answers and their end tokens.

Special tokens come from the template only. One that is spelled in a turn, such as a user's "</s>", stays
text: a border within its spelling divides the text before it is encoded.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError

_BORDER = "\ufdd0"
"""A noncharacter, which Unicode reserves for the inside of programs."""


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of one text."""

    ids: np.ndarray
    """int32 [L]."""
    counts: np.ndarray
    """bool [L], whether the prediction of this token counts in the loss."""
    branches: np.ndarray | None = None
    """int32 [L], where several texts begin alike: 0 for the tokens that they share, then k for those of text
    k alone, which see the shared ones and their own; see ``share_beginning``. None where it is one text."""
    cut: int = 0
    """Number of tokens truncated at its end because it was longer than a row."""

    def __len__(self) -> int:
        return len(self.ids)


def prompt_ids(tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Turn]) -> list[int]:
    """Returns the ids of a prompt, up to the answer to the last turn, the same as in training.

    A template that writes earlier turns differently once others follow has no such ids: then they are those
    of the text as a whole. Turns that are not a conversation that ends with the user's turn are a
    ``DataError``.
    """
    bordered = _bordered(tokenizer, turns)
    text = template.prompt(bordered)
    try:
        texts = [piece.text for piece in template.pieces(bordered)]
    except DataError:
        texts = [text]
    return [number for ids in _encoded(tokenizer, texts) for number in ids]


def tokenize(tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Turn]) -> TokenizedText:
    """Tokenizes a conversation; answers and their end tokens count in the loss.

    It begins with BOS if texts do, but never twice. No token spans two pieces, or a border.
    """
    pieces = template.pieces(_bordered(tokenizer, turns))
    encoded = _encoded(tokenizer, [piece.text for piece in pieces])
    return TokenizedText(
        np.concatenate([np.array(ids, np.int32) for ids in encoded]),
        np.repeat([piece.is_answer for piece in pieces], [len(ids) for ids in encoded]),
    )


def share_beginning(texts: Sequence[TokenizedText]) -> TokenizedText:
    """Several texts as one, in which the tokens that all begin with stand once.

    Packed so, each text is trained on exactly as if it stood alone. So a document costs as much as one
    question about it, however many are asked, and none sees the answer to another.
    """
    length = min(map(len, texts))
    alike = np.all([text.ids[:length] == texts[0].ids[:length] for text in texts], axis=0)
    # The token before an answer predicts the answer's first one, so it belongs to the branch.
    answered = np.any([np.append(text.counts[1:], False)[:length] for text in texts], axis=0)
    shared = int(np.argmin(np.append(alike & ~answered, False)))
    own = [len(text) - shared for text in texts]
    return TokenizedText(
        np.concatenate([texts[0].ids[:shared], *(text.ids[shared:] for text in texts)]),
        np.concatenate([texts[0].counts[:shared], *(text.counts[shared:] for text in texts)]),
        np.repeat(np.arange(len(texts) + 1, dtype=np.int32), [shared, *own]),
    )


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of texts that follow each other, each on its own, with BOS in front if texts begin with it."""
    encoded: list[list[int]] = []
    before = ""
    for text in texts:
        ids: list[int] = []
        for run in text.split(_BORDER):
            ids += tokenizer.encode(run, after=before)
            before = run or before
        encoded.append(ids)
    if tokenizer.add_bos and tokenizer.bos_id is not None and encoded[0][:1] != [tokenizer.bos_id]:
        encoded[0].insert(0, tokenizer.bos_id)
    return encoded


def _bordered(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[Turn]:
    """The turns with a border after the first letter of each special token that is spelled in them."""
    texts = [turn.text.replace(_BORDER, "\N{REPLACEMENT CHARACTER}") for turn in turns]
    tokens = [token for token in tokenizer.special_tokens if len(token) > 1]
    # Looked for one by one first: in a long text that takes a fraction of the time of the expression.
    spelled = [token for token in tokens if any(token in text for text in texts)]
    if spelled:
        # The lookahead also finds spellings that overlap.
        begin = re.compile(f"(?={'|'.join(map(re.escape, spelled))})(.)", re.DOTALL)
        texts = [begin.sub(rf"\1{_BORDER}", text) for text in texts]
    return [Turn(turn.role, text) for turn, text in zip(turns, texts, strict=True)]


def tokenize_in_parts(
    tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Turn], length: int
) -> Iterator[TokenizedText]:
    """Splits a conversation between its turns into as few parts of at most ``length`` tokens as possible.

    Each part is a conversation of its own that begins with the system's turn. A question and its answer stay
    together; a pair that is longer than a row is truncated, and ``TokenizedText.cut`` counts the removed
    tokens. Turns that are not a conversation are a ``DataError``.
    """
    whole = tokenize(tokenizer, template, turns)
    if len(whole) <= length:
        yield whole
        return
    opening = list(turns[:1]) if turns[0].role == "system" else []
    spoken = turns[len(opening) :]

    def longest(spoken: Sequence[Turn]) -> tuple[int, TokenizedText]:
        """Returns the number of first pairs that fit into a row, at least one, and their tokens."""

        @cache
        def text_of(pairs: int) -> TokenizedText:
            return tokenize(tokenizer, template, [*opening, *spoken[: 2 * pairs]])

        # Bisection after doubling: long conversations are encoded a few times, not once per pair.
        pairs = range(1, (len(spoken) + 1) // 2 + 1)
        upper = 1
        while upper < len(pairs) and len(text_of(upper)) <= length:
            upper *= 2
        ends = upper // 2, min(upper, len(pairs))
        fits = max(1, bisect_right(pairs, length, *ends, key=lambda count: len(text_of(count))))
        return fits, text_of(fits)

    while spoken:
        count, part = longest(spoken)
        yield TokenizedText(part.ids[:length], part.counts[:length], cut=max(0, len(part) - length))
        spoken = spoken[2 * count :]
