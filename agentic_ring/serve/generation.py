"""Text generation for requests: answers to prompts, and log probabilities of their tokens."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.detokenizer import AnswerText, IncrementalDetokenizer, generate_answers
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import Score, TextEngine
from agentic_ring.serve.prompts import TOKENS, ContextLengthError, Prompt

CheckConnected = Callable[[], None]
"""Raises an ``AbandonedError`` once the client has left."""


class AbandonedError(Exception):
    """The client has disconnected."""


class ScoredToken(NamedTuple):
    """A token of a prompt or an answer; the first token has no log probability."""

    text: str
    """Text that the token adds; special tokens are spelled out."""
    offset: int
    """Number of characters of prompt and answer before it."""
    log_probability: float | None
    """Given all earlier tokens."""
    likeliest: tuple[str, float] | None
    """Text and log probability of the most likely token at its place."""


@dataclass(frozen=True)
class GeneratedText:
    """The answer to a prompt."""

    text: str
    """The answer, after the prompt if the request has ``echo``."""
    ended: Literal["stop", "length"]
    tokens: int
    """Number of tokens of the answer."""
    scored: list[ScoredToken] | None
    """Tokens of ``text`` with log probabilities; None unless requested."""


@dataclass(eq=False)
class GenerationRequest:
    """A client's request, from its arrival to its answers."""

    encode: Callable[[CheckConnected], Sequence[Prompt]]
    """Encodes the prompts, at least one, which is slow."""
    max_new_tokens: int
    """Limit of each answer; 0 generates none. Read once the prompts are encoded."""
    sampling: Sampling
    stop: Sequence[str] = ()
    """Strings that end an answer; they are not part of it."""
    stop_tokens: Sequence[int] = ()
    """Tokens that end an answer, beside those of its prompt."""
    echo: bool = False
    """Put the prompt before the answer."""
    scored: bool = False
    """Return log probabilities."""
    continues: bool = True
    """The answer continues the prompt's text, including the space between them, and is no separate text."""
    on_text: Callable[[str], object] = lambda text: None
    """Gets each new part of a single answer."""
    prompts: Future[Sequence[Prompt]] = field(default_factory=Future)
    """Set once the prompts are encoded and fit the model."""
    answers: Future[list[GeneratedText]] = field(default_factory=Future)
    """One for each prompt; running once the model has begun, after which nothing cancels it."""
    has_left: bool = False

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens of the first prompt."""
        return self.prompts.result()[0].tokens

    @property
    def is_single(self) -> bool:
        """Whether it asks for one answer and nothing else, so that it can share a batch."""
        return len(self.prompts.result()) == 1 and self.max_new_tokens > 0 and not self.scored

    def leave(self) -> None:
        """The client has disconnected: the request leaves the queue, or its answer ends."""
        self.has_left = True
        self.answers.cancel()

    def check_connected(self) -> None:
        """Raises an AbandonedError if the client has left."""
        if self.has_left:
            raise AbandonedError

    def finish(self, answers: list[GeneratedText]) -> None:
        """Gives the client its answers, unless it has left the queue."""
        with suppress(InvalidStateError):
            self.answers.set_result(answers)


class RequestBatch:
    """Up to ``rows`` requests for single answers whose prompts share a cached beginning, or are all short.

    ``rows`` rests of prompts with their answers have at most ``slots`` tokens, so that a batch needs no more
    memory than one prompt of that length; only the first request may exceed it, alone.

    Attributes:
      shared: number of leading tokens that the prompts share with the cached text; 0 for short prompts.

    Raises:
      AbandonedError: the first request's client left before its prompt was encoded.
    """

    def __init__(self, prefixes: PrefixCache, rows: int, slots: int, first: GenerationRequest):
        self._prefixes, self._rows, self._slots = prefixes, rows, slots
        self.requests = [first]
        self.shared = prefixes.hold(first.tokens, lambda done: first.check_connected())

    def admit(self, request: GenerationRequest) -> bool:
        """Adds a request if it fits to the others; returns whether it does."""
        if not request.is_single or len(self.requests) == self._rows:
            return False
        shared = self._prefixes.shared(request.tokens)
        if bool(shared) != bool(self.shared) or not (shared or self._prefixes.is_short(request.tokens)):
            return False
        requests, shared = [*self.requests, request], min(self.shared, shared)
        prompt = max(len(each.tokens) for each in requests)
        answer = max(each.max_new_tokens for each in requests)
        if self._rows * (prompt - shared + answer) > self._slots:
            return False
        self._prefixes.hold(request.tokens)
        self.requests, self.shared = requests, shared
        return True


class TextGenerator:
    """Answers requests with one model, at most ``batch_size`` together, which continue the same text.

    A prompt and its answer have at most ``max_context`` tokens. ``prefixes`` caches the last long prompt.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer, max_context: int, batch_size: int = 8):
        self._engine, self._tokenizer = engine, tokenizer
        self._max_context, self._batch_size = max_context, batch_size
        self.prefixes = PrefixCache(engine)

    def token_prompt(self, tokens: Sequence[int]) -> Prompt:
        """The prompt of these tokens."""
        text = self._tokenizer.decode(tokens, skip_special=False)
        return Prompt(array(TOKENS, tokens), text, ends=self._tokenizer.eos_ids)

    def room(self, prompt: Prompt) -> int:
        """Maximum number of tokens of an answer."""
        return self._max_context - len(prompt.tokens)

    def check(self, prompts: Sequence[Prompt], max_new_tokens: int, stop_tokens: Sequence[int]) -> None:
        """Checks the tokens of a request, and how many they are.

        Raises:
          ContextLengthError: a prompt and its answer exceed the maximum context.
          ArgumentError: a prompt is empty, or a token is outside the vocabulary.
        """
        for prompt in prompts:
            if self.room(prompt) < max_new_tokens:
                raise ContextLengthError(
                    f"the prompt has {len(prompt.tokens)} tokens and {max_new_tokens} new ones are "
                    f"requested; together they may be {self._max_context}"
                )
        self._engine.check([*(prompt.tokens for prompt in prompts), *([stop_tokens] if stop_tokens else ())])

    def answer(
        self, request: GenerationRequest, take: Callable[[Callable[[GenerationRequest], bool]], object]
    ) -> int:
        """Answers a request whose prompts have passed ``check``, and others that continue the same text.

        Each gets the answer that it would get alone. The others are taken once the text is encoded: ``take``
        removes requests for which a function is true from the queue. Returns the number of requests.

        Raises:
          AbandonedError: the client of a request that is answered alone has left.
        """
        request.check_connected()
        if not request.is_single:
            groups = [self._answer_group(request, prompts) for prompts in self._groups(request)]
            request.finish([text for group in groups for text in group])
            return 1
        batch = RequestBatch(self.prefixes, self._batch_size, self._max_context, request)
        take(batch.admit)
        rows = [(each, each.prompts.result()[0]) for each in batch.requests]

        def on_text(row: int, text: str) -> bool:
            rows[row][0].on_text(text)
            return rows[row][0].has_left

        def on_end(row: int, answer: AnswerText) -> None:
            rows[row][0].finish([_generated(*rows[row], answer)])

        samplings = [each.sampling for each in batch.requests]
        least_rows = self._batch_size if len(rows) > 1 else 1
        self._generate(rows, samplings, batch.shared, on_text=on_text, on_end=on_end, least_rows=least_rows)
        return len(rows)

    def _groups(self, request: GenerationRequest) -> Iterator[list[Prompt]]:
        """Splits the prompts into batches that need no more memory than one prompt of maximum length."""
        group: list[Prompt] = []
        for prompt in request.prompts.result():
            longest = max(len(each.tokens) for each in (*group, prompt)) + request.max_new_tokens
            if group and longest * (len(group) + 1) > self._max_context:
                yield group
                group = []
            group.append(prompt)
        yield group

    def _answer_group(self, request: GenerationRequest, prompts: list[Prompt]) -> list[GeneratedText]:
        rows, shared = [(request, prompt) for prompt in prompts], 0
        if len(prompts) == 1 and request.max_new_tokens:
            shared = self.prefixes.hold(prompts[0].tokens, lambda done: request.check_connected())
        answers = self._generate(rows, request.sampling, shared, on_text=lambda row, text: request.has_left)
        request.check_connected()
        scored = self._scored(request, prompts, answers, shared) if request.scored else [None] * len(rows)
        found = zip(rows, answers, scored, strict=True)
        return [_generated(*row, answer, tokens) for row, answer, tokens in found]

    def _generate(
        self,
        rows: list[tuple[GenerationRequest, Prompt]],
        sampling: Sampling | list[Sampling],
        shared: int,
        **options: Any,
    ) -> list[AnswerText]:
        """Answers one prompt of a request in each row; their first ``shared`` tokens are cached.

        With one ``sampling``, the rows draw different samples; each of several draws as it does alone. The
        ``options`` are those of ``generate_answers``.
        """
        answers = [
            AnswerText(
                self._tokenizer,
                prompt.tokens if request.continues else (),
                request.stop,
                (*prompt.ends, *request.stop_tokens),
            )
            for request, prompt in rows
        ]
        limits = [request.max_new_tokens for request, _ in rows]
        if limits[0]:
            rests, document = [prompt.tokens[shared:] for _, prompt in rows], self.prefixes.beginning(shared)
            given = rests, answers, limits, sampling
            generate_answers(self._engine, *given, document=document, **options)
        return answers

    def _scored(
        self, request: GenerationRequest, prompts: list[Prompt], answers: list[AnswerText], shared: int
    ) -> list[list[ScoredToken]]:
        """Tokens of each prompt and answer with log probabilities, from a second pass."""
        document = None if request.echo else self.prefixes.beginning(shared)
        read = 0 if document is None else document.length
        # Clients count the generated tokens, so a stop token is one of them.
        ends = [[] if (end := a.completion.stop_token) is None else [end] for a in answers]
        wholes = [
            [*prompt.tokens, *answer.completion.tokens, *end]
            for prompt, answer, end in zip(prompts, answers, ends, strict=True)
        ]
        firsts = [1 if request.echo else len(prompt.tokens) for prompt in prompts]
        pairs = [(whole[read:first], whole[first:]) for whole, first in zip(wholes, firsts, strict=True)]
        asked = [pair for pair in pairs if pair[1]]
        scores = iter(self._engine.score(asked, document=document) if asked else ())
        rows = []
        for prompt, whole, (_, continuation), answer in zip(prompts, wholes, pairs, answers, strict=True):
            score = next(scores) if continuation else Score([], [], [], [])
            shown, offset = (prompt.added, 0) if request.echo else (len(prompt.tokens), len(prompt.text))
            found = _scored_tokens(self._tokenizer, whole, score, shown, offset)
            end = len(prompt.text) + len(answer.text)
            # Tokens of a stop string were generated, but are not part of the answer.
            rows.append([token for token in found if not answer.stopped or token.offset < end])
        return rows


def _generated(
    request: GenerationRequest, prompt: Prompt, answer: AnswerText, scored: list[ScoredToken] | None = None
) -> GeneratedText:
    text = prompt.text + answer.text if request.echo else answer.text
    completion = answer.completion
    return GeneratedText(text, completion.ended or "length", len(completion.tokens), scored)


def _scored_tokens(
    tokenizer: Tokenizer, tokens: Sequence[int], score: Score, shown: int, offset: int
) -> Iterator[ScoredToken]:
    """Yields the tokens from index ``shown`` on, which has ``offset`` characters before it.

    ``score`` is that of the last tokens, fewer or more than are shown.
    """
    decode = partial(tokenizer.decode, skip_special=False)
    pieces = IncrementalDetokenizer(tokenizer, tokens[:shown], skip_special=False)
    for place in range(shown, len(tokens)):
        text = pieces.add(tokens[place])
        if place + 1 == len(tokens):
            text += pieces.rest()
        index, log_probability, likeliest = place - (len(tokens) - len(score.tokens)), None, None
        if index >= 0:
            log_probability = score.log_probabilities[index]
            likeliest = decode([score.likeliest[index]]), score.likeliest_log_probabilities[index]
        yield ScoredToken(text, offset, log_probability, likeliest)
        offset += len(text)
