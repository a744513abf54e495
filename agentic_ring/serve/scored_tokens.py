"""Tokens with their text and log probabilities."""

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
      text: text that the token adds; special tokens are spelled out.
      offset: number of characters of prompt and answer before it.
      log_probability: log probability given all earlier tokens; None for the first token.
      likeliest: text and log probability of the most likely token at its place; None for the first token.
    """

    text: str
    offset: int
    log_probability: float | None
    likeliest: tuple[str, float] | None


def scored_tokens(
    tokenizer: Tokenizer, tokens: Sequence[int], score: Score, shown: int, offset: int
) -> Iterator[ScoredToken]:
    """Yields the tokens from index ``shown`` on.

    Args:
      tokenizer: tokenizer of the model.
      tokens: tokens of prompt and answer.
      score: score of the last tokens.
      shown: index of the first token to return.
      offset: number of characters before that token.
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
