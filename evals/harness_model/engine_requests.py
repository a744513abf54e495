"""Scores and answers that lm-evaluation-harness requests, computed by our engine.

This module does not import lm_eval, so that it can be tested without the extra ``harness``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.inference.detokenizer import AnswerText, generate_answers
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import TextEngine

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context and tokens of its continuation."""

DEFAULT_NEW_TOKENS = 256
"""Maximum length of an answer if the task sets none, as in the harness's own models."""

_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Generation:
    """Settings for generating an answer.

    Attributes:
      new_tokens: maximum number of tokens.
      until: strings that end the answer.
      sampling: how tokens are sampled.
    """

    new_tokens: int
    until: tuple[str, ...]
    sampling: Sampling

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], seed: int) -> "Generation":
        """Reads the ``generation_kwargs`` of a task.

        Raises:
          ConfigError: an unknown setting, which might change the answer.
        """
        unread = dict(settings)
        lengths = [value for name in _NEW_TOKENS if (value := unread.pop(name, None)) is not None]
        until = unread.pop("until", None) or ()
        temperature, top_p = unread.pop("temperature", None) or 0.0, unread.pop("top_p", None) or 1.0
        do_sample = unread.pop("do_sample", None)
        if unread:
            raise ConfigError(
                f"the task sets {', '.join(sorted(unread))} for its answers; only until, do_sample, "
                f"temperature, top_p and {_NEW_TOKENS[0]} are supported"
            )
        return cls(
            int(lengths[0]) if lengths else DEFAULT_NEW_TOKENS,
            (until,) if isinstance(until, str) else tuple(until),
            Sampling(0.0 if do_sample is False else float(temperature), float(top_p), seed),
        )


class HarnessRequests:
    """Scores and answers of one model, for one context at a time.

    The common prefix of two consecutive contexts is encoded only once.

    Args:
      engine: runs the model.
      tokenizer: the model's tokenizer.
      max_length: maximum number of tokens of prompt and answer together.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer, max_length: int):
        self._engine = engine
        self._tokenizer = tokenizer
        self._prefixes = PrefixCache(engine)
        self.max_length = max_length

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        """Log probability of each continuation, and whether greedy decoding would produce it.

        Raises:
          ArgumentError: a pair is too long, or one of its parts is empty.
        """
        # The choices of one question are adjacent.
        for context, group in groupby(pairs, key=lambda pair: list(pair[0])):
            continuations = [list(continuation) for _, continuation in group]
            self._check(len(context) + max(map(len, continuations)))
            document, rest = self._prefixes.split(context)
            scores = self._engine.score([(rest, tokens) for tokens in continuations], document=document)
            yield from ((score.total, score.greedy) for score in scores)

    def answer(self, context: str, generation: Generation) -> str:
        """The model's answer to a context.

        Raises:
          ArgumentError: context and answer together are too long.
        """
        tokens = self._tokenizer.encode_prompt(context)
        self._check(len(tokens) + generation.new_tokens)
        document, rest = self._prefixes.split(tokens)
        text = AnswerText(self._tokenizer.decode, (), generation.until)
        generate_answers(
            self._engine,
            self._tokenizer,
            [rest],
            [text],
            generation.new_tokens,
            generation.sampling,
            document=document,
        )
        return text.text

    def _check(self, length: int) -> None:
        if length > self.max_length:
            raise ArgumentError(
                f"a prompt and its answer take {length} tokens, but the limit is {self.max_length}; prompts "
                "are never truncated, so raise --max-length or choose shorter tasks"
            )


def chat_prompt(template: ChatTemplate, turns: Sequence[Turn]) -> str:
    """The prompt of a conversation; if it ends with an assistant's turn, the model continues that turn.

    Raises:
      DataError: the turns do not form a conversation.
    """
    if turns[-1].role != "assistant":
        return template.prompt(turns)
    *parts, last = (part.text for part in template.pieces(turns))
    begun = turns[-1].text.strip()
    # The end-of-answer token comes after the text.
    return "".join(parts) + last[: last.rindex(begun) + len(begun)]
