"""Scores and answers that lm-evaluation-harness requests, computed by our engine.

This module does not import lm_eval, so that it can be tested without the extra ``harness``.
"""

from collections.abc import Iterator, Mapping, Sequence
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


def read_settings(settings: Mapping[str, Any], seed: int) -> tuple[int, tuple[str, ...], Sampling]:
    """Maximum number of new tokens, stop strings and sampling in the ``generation_kwargs`` of a task.

    An unknown setting is a ConfigError: it might change the answer.
    """
    unread = dict(settings)
    lengths = [value for name in _NEW_TOKENS if (value := unread.pop(name, None)) is not None]
    until = unread.pop("until", None) or ()
    temperature, top_p = unread.pop("temperature", None) or 0.0, unread.pop("top_p", None) or 1.0
    if unread.pop("do_sample", None) is False:
        temperature = 0.0
    if unread:
        raise ConfigError(
            f"the task sets {', '.join(sorted(unread))} for its answers; only until, do_sample, "
            f"temperature, top_p and {_NEW_TOKENS[0]} are supported"
        )
    stops = (until,) if isinstance(until, str) else tuple(until)
    return int([*lengths, DEFAULT_NEW_TOKENS][0]), stops, Sampling(float(temperature), float(top_p), seed)


class HarnessRequests:
    """Scores and answers of one model, for one context at a time.

    The common prefix of two consecutive contexts is encoded only once. A prompt and its answer have at most
    ``max_length`` tokens, more are an ArgumentError; ``seed`` is that of sampled answers, which end at one of
    the tokens ``ends``.
    """

    def __init__(
        self, engine: TextEngine, tokenizer: Tokenizer, ends: Sequence[int], max_length: int, seed: int = 0
    ):
        self._engine, self._tokenizer, self._prefixes = engine, tokenizer, PrefixCache(engine)
        self._ends, self.max_length, self._seed = ends, max_length, seed

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        """Log probability of each continuation, and whether greedy decoding would produce it."""
        # The choices of one question are adjacent.
        for context, group in groupby(pairs, key=lambda pair: list(pair[0])):
            continuations = [list(continuation) for _, continuation in group]
            self._check(len(context) + max(map(len, continuations)))
            document, rest = self._prefixes.split(context)
            scores = self._engine.score([(rest, tokens) for tokens in continuations], document=document)
            yield from ((score.total, score.greedy) for score in scores)

    def answer(self, context: str, settings: Mapping[str, Any]) -> str:
        """The model's answer to a context by a task's settings; see ``read_settings``."""
        new_tokens, until, sampling = read_settings(settings, self._seed)
        tokens = self._tokenizer.encode_prompt(context)
        self._check(len(tokens) + new_tokens)
        document, rest = self._prefixes.split(tokens)
        text = AnswerText(self._tokenizer, (), until, self._ends)
        generate_answers(self._engine, [rest], [text], new_tokens, sampling, document=document)
        return text.text

    def _check(self, length: int) -> None:
        if length > self.max_length:
            raise ArgumentError(
                f"a prompt and its answer take {length} tokens, but the limit is {self.max_length}; prompts "
                "are never truncated, so raise --max-length or choose shorter tasks"
            )


def chat_prompt(template: ChatTemplate, turns: Sequence[Turn]) -> str:
    """The prompt of a conversation; if it ends with an assistant's turn, the model continues that turn."""
    if turns[-1].role != "assistant":
        return template.prompt(turns)
    *parts, last = (part.text for part in template.pieces(turns))
    begun = turns[-1].text.strip()
    # The end-of-answer token comes after the text.
    return "".join(parts) + last[: last.rindex(begun) + len(begun)]
