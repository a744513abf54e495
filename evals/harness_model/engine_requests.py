"""What lm-evaluation-harness asks of a model, on ours: nothing here needs the harness itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.inference import Sampling, TextEngine
from agentic_ring.inference.detokenizer import AnswerText, generate_answers
from agentic_ring.inference.prefix_cache import PrefixCache

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context and of its continuation."""

DEFAULT_NEW_TOKENS = 256
"""Of an answer whose task says nothing, as in the harness's own models."""

_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Generation:
    """How an answer is written.

    Attributes:
      new_tokens: at most.
      until: strings that end it.
      sampling: how tokens are chosen.
    """

    new_tokens: int
    until: tuple[str, ...]
    sampling: Sampling

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], seed: int) -> "Generation":
        """From the ``generation_kwargs`` of a task.

        Raises:
          ConfigError: a setting that would change the answer and is not known.
        """
        left = dict(settings)
        lengths = [value for name in _NEW_TOKENS if (value := left.pop(name, None)) is not None]
        until = left.pop("until", None) or ()
        temperature, top_p = left.pop("temperature", None) or 0.0, left.pop("top_p", None) or 1.0
        draws = left.pop("do_sample", None)
        if left:
            raise ConfigError(
                f"the task sets {', '.join(sorted(left))} for its answers; only until, do_sample, "
                f"temperature, top_p and {_NEW_TOKENS[0]} are supported"
            )
        return cls(
            int(lengths[0]) if lengths else DEFAULT_NEW_TOKENS,
            (until,) if isinstance(until, str) else tuple(until),
            Sampling(0.0 if draws is False else float(temperature), float(top_p), seed),
        )


class HarnessRequests:
    """Scores and answers of one model, one context at a time; what two in turn begin with is read once.

    Args:
      engine: that reads and writes.
      tokenizer: of its model.
      max_length: tokens of a text at most, the answer included.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer, max_length: int):
        self._engine = engine
        self._tokenizer = tokenizer
        self._last = PrefixCache(engine)
        self.max_length = max_length

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        """Log probability of each continuation, and whether each of its tokens is the likeliest.

        Raises:
          ArgumentError: a pair that is too long, or an empty part of one.
        """
        # The choices of a question follow one another.
        for context, group in groupby(pairs, key=lambda pair: list(pair[0])):
            continuations = [list(continuation) for _, continuation in group]
            self._check(len(context) + max(map(len, continuations)))
            document, rest = self._last.split(context)
            scores = self._engine.score([(rest, tokens) for tokens in continuations], document=document)
            yield from ((score.total, score.greedy) for score in scores)

    def answer(self, context: str, generation: Generation) -> str:
        """What the model writes after a context.

        Raises:
          ArgumentError: context and answer are too long together.
        """
        tokens = self._tokenizer.encode_prompt(context)
        self._check(len(tokens) + generation.new_tokens)
        document, rest = self._last.split(tokens)
        text = AnswerText(self._tokenizer.decode, (), generation.until)
        generate_answers(
            self._engine,
            self._tokenizer,
            [rest],
            [text],
            generation.new_tokens,
            generation.sampling,
            generation.until,
            document=document,
        )
        return text.text

    def _check(self, length: int) -> None:
        if length > self.max_length:
            raise ArgumentError(
                f"a prompt and its answer take {length} tokens, but the limit is {self.max_length}; nothing "
                "is ever cut, so raise --max-length or take shorter tasks"
            )


def chat_prompt(template: ChatTemplate, turns: Sequence[Turn]) -> str:
    """The text up to where the model goes on: an answer, or the rest of one that has been begun.

    Raises:
      DataError: the turns are no conversation.
    """
    if turns[-1].role != "assistant":
        return template.prompt(turns)
    *pieces, last = (piece.text for piece in template.pieces(turns))
    begun = turns[-1].text.strip()
    # What ends an answer stands behind its text.
    return "".join(pieces) + last[: last.rindex(begun) + len(begun)]
