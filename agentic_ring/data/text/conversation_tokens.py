"""Conversations as token ids, with the tokens that count in the loss: the answers and what ends them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentic_ring.data.text.chat import ChatTemplate, Piece, Turn
from agentic_ring.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizedText:
    """One text.

    Attributes:
      ids: int32 [L].
      counts: bool [L], whether it counts in the loss that this token is predicted.
      cut: tokens that were taken off its end, because it was too long for a row.
    """

    ids: np.ndarray
    counts: np.ndarray
    cut: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[list[int]]:
    """The ids of each piece as it goes on from the one before; the first begins with BOS where due.

    A template that writes BOS itself gets no second one.
    """
    encoded: list[list[int]] = []
    before = ""
    for piece in pieces:
        encoded.append(tokenizer.encode(piece.text, after=before))
        before = piece.text or before
    if encoded and tokenizer.add_bos and tokenizer.bos_id is not None:
        first = encoded[0]
        if first[:1] != [tokenizer.bos_id]:
            encoded[0] = [tokenizer.bos_id, *first]
    return encoded


def prompt_ids(tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Turn]) -> list[int]:
    """What a model reads before it answers the last turn: the very ids it was trained on.

    Raises:
      DataError: the turns are no conversation that ends with the user's.
    """
    template.prompt(turns)
    return [number for ids in encode_pieces(tokenizer, template.pieces(turns)) for number in ids]


def tokenize(tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Turn]) -> TokenizedText:
    """A conversation's ids; loss counts on answers and what ends them.

    Raises:
      DataError: the turns are no conversation.
    """
    pieces = template.pieces(turns)
    encoded = encode_pieces(tokenizer, pieces)
    lengths = [len(ids) for ids in encoded]
    return TokenizedText(
        np.concatenate([np.array(ids, np.int32) for ids in encoded]),
        np.repeat([piece.is_answer for piece in pieces], lengths),
    )


def tokenize_in_parts(
    tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Turn], length: int
) -> Iterator[TokenizedText]:
    """A conversation in as few parts of at most ``length`` tokens as its turns allow.

    Each part is a conversation of its own, with the system's words in front. A question and its answer
    stay together; where one such pair is too long, its end is cut off, and ``TokenizedText.cut`` says
    how many tokens that took.

    Args:
      tokenizer, template: what writes the conversation.
      turns: of a conversation.
      length: tokens of a row.

    Raises:
      DataError: the turns are no conversation.
    """
    whole = tokenize(tokenizer, template, turns)
    if len(whole) <= length:
        yield whole
        return
    opening = list(turns[:1]) if turns[0].role == "system" else []
    spoken = turns[len(opening) :]
    pairs = [spoken[start : start + 2] for start in range(0, len(spoken), 2)]
    while pairs:
        count, part = _longest_part(tokenizer, template, opening, pairs, length)
        yield TokenizedText(part.ids[:length], part.counts[:length], max(0, len(part) - length))
        pairs = pairs[count:]


def _longest_part(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    opening: list[Turn],
    pairs: Sequence[Sequence[Turn]],
    length: int,
) -> tuple[int, TokenizedText]:
    """As many of the first pairs as fit, at least one, and their ids."""

    def text_of(count: int) -> TokenizedText:
        return tokenize(tokenizer, template, [*opening, *(turn for pair in pairs[:count] for turn in pair)])

    # The number of pairs is doubled until they are too many, and the interval then halved: what does
    # not fit is encoded a few times, not once for each pair.
    fits, best, too_many = 0, None, 1
    while too_many <= len(pairs) and len(text := text_of(too_many)) <= length:
        fits, best, too_many = too_many, text, 2 * too_many
    too_many = min(too_many, len(pairs) + 1)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        text = text_of(middle)
        if len(text) <= length:
            fits, best = middle, text
        else:
            too_many = middle
    return (1, text_of(1)) if best is None else (fits, best)
