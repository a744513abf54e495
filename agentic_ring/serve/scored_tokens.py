"""Tokens as text, with their log probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference import Score
from agentic_ring.inference.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class ScoredToken:
    """A token of a prompt or an answer.

    Attributes:
      text: what it adds to the text, special tokens spelled out.
      offset: characters of prompt and answer before it.
      log_probability: given all before it; None where nothing stands before it.
      likeliest: the likeliest token in its place, as text, and its log probability; likewise.
    """

    text: str
    offset: int
    log_probability: float | None
    likeliest: tuple[str, float] | None


def scored_tokens(
    tokenizer: Tokenizer, tokens: Sequence[int], score: Score, shown: int, offset: int
) -> Iterator[ScoredToken]:
    """Describes the tokens from number ``shown`` on.

    Args:
      tokenizer: that they are of.
      tokens: of prompt and answer.
      score: of the last of them, as many as it has.
      shown: the first to describe.
      offset: characters before that one.
    """
    decode = partial(tokenizer.decode, skip_special=False)
    pieces = IncrementalDetokenizer(decode, tokens[:shown])
    first_scored = len(tokens) - len(score.tokens)
    for place in range(shown, len(tokens)):
        text = pieces.add(tokens[place])
        if place + 1 == len(tokens):
            text += pieces.rest()
        index = place - first_scored
        if index < 0:
            yield ScoredToken(text, offset, None, None)
        else:
            likeliest = decode([score.likeliest[index]]), score.likeliest_log_probabilities[index]
            yield ScoredToken(text, offset, score.log_probabilities[index], likeliest)
        offset += len(text)
