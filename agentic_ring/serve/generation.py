"""Text generation for requests: answers to prompts, and log probabilities of their tokens."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.detokenizer import AnswerText, IncrementalDetokenizer, generate_answers
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import Completion, Document, Score, TextEngine
from agentic_ring.serve.prompts import TOKENS, ContextLengthError, Prompt

CheckConnected = Callable[[], None]
"""Raises an ``AbandonedError`` once the client has left."""


class AbandonedError(Exception):
    """The client has disconnected."""


@dataclass(frozen=True)
class GenerationJob:
    """Prompts to answer, at least one, and how."""

    prompts: Sequence[Prompt]
    max_new_tokens: int
    """Limit of each answer; 0 generates none."""
    sampling: Sampling
    stop: Sequence[str] = ()
    """Strings that end an answer; they are not part of it."""
    echo: bool = False
    """Put the prompt before the answer."""
    scored: bool = False
    """Return log probabilities."""
    continues: bool = True
    """The answer continues the prompt's text, including the space between them, and is no separate text."""

    @property
    def is_single(self) -> bool:
        """Whether it asks for one answer and nothing else, so that it can share a batch."""
        return len(self.prompts) == 1 and self.max_new_tokens > 0 and not self.scored


@dataclass(frozen=True)
class ScoredToken:
    """A token of a prompt or an answer; the first token has no log probability."""

    text: str
    """Text that the token adds; special tokens are spelled out."""
    offset: int
    """Number of characters of prompt and answer before it."""
    log_probability: float | None = None
    """Log probability given all earlier tokens."""
    likeliest: tuple[str, float] | None = None
    """Text and log probability of the most likely token at its place."""


@dataclass(frozen=True)
class GeneratedText:
    """The answer to a prompt."""

    text: str
    """The answer, after the prompt if the job has ``echo``."""
    ended: Literal["stop", "length"]
    tokens: int
    """Number of tokens of the answer."""
    scored: list[ScoredToken] | None
    """Tokens of ``text`` with log probabilities; None unless requested."""


class GenerationRequest:
    """A client's request, from its arrival to its answers.

    ``make_job`` encodes the prompts, which is slow; ``on_text`` gets each new part of a single answer.

    Attributes:
      job: set once the prompts are encoded and fit the model.
      answers: one for each prompt; running once the model has begun, after which nothing cancels it.
    """

    def __init__(
        self,
        make_job: Callable[[CheckConnected], GenerationJob],
        on_text: Callable[[str], object] = lambda text: None,
    ):
        self.make_job, self.on_text = make_job, on_text
        self.job: Future[GenerationJob] = Future()
        self.answers: Future[list[GeneratedText]] = Future()
        self.has_left = False

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


Take = Callable[[Callable[[GenerationRequest], bool]], object]
"""Takes those waiting requests out of the queue, in order of arrival, for which a function is true."""


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
        job = first.job.result()
        tokens = job.prompts[0].tokens
        self._longest_prompt, self._longest_answer = len(tokens), job.max_new_tokens
        self.shared = prefixes.hold(tokens, lambda done: first.check_connected())

    def admit(self, request: GenerationRequest) -> bool:
        """Adds a request if it fits to the others; returns whether it does."""
        job = request.job.result()
        if not job.is_single or len(self.requests) == self._rows:
            return False
        tokens = job.prompts[0].tokens
        shared = self._prefixes.shared(tokens)
        if bool(shared) != bool(self.shared) or not (shared or self._prefixes.is_short(tokens)):
            return False
        prompt, answer = max(self._longest_prompt, len(tokens)), max(self._longest_answer, job.max_new_tokens)
        if self._rows * (prompt - min(self.shared, shared) + answer) > self._slots:
            return False
        self._prefixes.hold(tokens)
        self._longest_prompt, self._longest_answer = prompt, answer
        self.shared = min(self.shared, shared)
        self.requests.append(request)
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
        return Prompt(array(TOKENS, tokens), self._tokenizer.decode(tokens, skip_special=False))

    def room(self, prompt: Prompt) -> int:
        """Maximum number of tokens of an answer."""
        return self._max_context - len(prompt.tokens)

    def check(self, job: GenerationJob) -> None:
        """Checks the tokens of a job, and how many they are.

        Raises:
          ContextLengthError: a prompt and its answer exceed the maximum context.
          ArgumentError: a prompt is empty, or a token is outside the vocabulary.
        """
        for prompt in job.prompts:
            if self.room(prompt) < job.max_new_tokens:
                raise ContextLengthError(
                    f"the prompt has {len(prompt.tokens)} tokens and {job.max_new_tokens} new ones are "
                    f"requested; together they may be {self._max_context}"
                )
        self._engine.check([prompt.tokens for prompt in job.prompts])

    def answer(self, request: GenerationRequest, take: Take) -> int:
        """Answers a request whose job has passed ``check``, and others that continue the same text.

        Each gets the answer that it would get alone. The others are taken once the text is encoded. Returns
        the number of requests.

        Raises:
          AbandonedError: the client of a request that is answered alone has left.
        """
        request.check_connected()
        job = request.job.result()
        if not job.is_single:
            groups = [self._answer_group(request, group) for group in self._groups(job)]
            request.finish([text for group in groups for text in group])
            return 1
        batch = RequestBatch(self.prefixes, self._batch_size, self._max_context, request)
        take(batch.admit)
        requests = batch.requests
        jobs = [request.job.result() for request in requests]

        def on_text(row: int, text: str) -> bool:
            requests[row].on_text(text)
            return requests[row].has_left

        def on_end(row: int, answer: Completion, text: AnswerText) -> None:
            requests[row].finish([_generated(jobs[row], jobs[row].prompts[0], answer, text)])

        self._generate(
            jobs,
            [job.prompts[0] for job in jobs],
            [job.sampling for job in jobs],
            batch.shared,
            on_text,
            on_end,
            least_rows=self._batch_size if len(jobs) > 1 else 1,
        )
        return len(requests)

    def _groups(self, job: GenerationJob) -> Iterator[list[Prompt]]:
        """Splits the prompts into batches that need no more memory than one prompt of maximum length."""
        group: list[Prompt] = []
        for prompt in job.prompts:
            longest = max(len(each.tokens) for each in (*group, prompt)) + job.max_new_tokens
            if group and longest * (len(group) + 1) > self._max_context:
                yield group
                group = []
            group.append(prompt)
        yield group

    def _answer_group(self, request: GenerationRequest, prompts: list[Prompt]) -> list[GeneratedText]:
        job, shared = request.job.result(), 0
        if len(prompts) == 1 and job.max_new_tokens:
            shared = self.prefixes.hold(prompts[0].tokens, lambda done: request.check_connected())
        jobs = [job] * len(prompts)
        answers, texts = self._generate(
            jobs, prompts, job.sampling, shared, lambda row, text: request.has_left
        )
        request.check_connected()
        scored = [None] * len(prompts)
        if job.scored:
            scored = self._scored(job, prompts, answers, texts, self.prefixes.beginning(shared))
        return [_generated(job, *row) for row in zip(prompts, answers, texts, scored, strict=True)]

    def _generate(
        self,
        jobs: list[GenerationJob],
        prompts: list[Prompt],
        sampling: Sampling | list[Sampling],
        shared: int,
        on_text: Callable[[int, str], bool],
        on_end: Callable[[int, Completion, AnswerText], None] = lambda row, answer, text: None,
        least_rows: int = 1,
    ) -> tuple[list[Completion], list[AnswerText]]:
        """Answers the prompt of each job, whose first ``shared`` tokens are cached.

        With one ``sampling``, the rows draw different samples; each of several draws as it does alone.
        """
        texts = [
            AnswerText(self._tokenizer.decode, prompt.tokens if job.continues else (), job.stop)
            for job, prompt in zip(jobs, prompts, strict=True)
        ]
        if not jobs[0].max_new_tokens:
            return [Completion(ended="length") for _ in prompts], texts
        answers = generate_answers(
            self._engine,
            self._tokenizer,
            [prompt.tokens[shared:] for prompt in prompts],
            texts,
            [job.max_new_tokens for job in jobs],
            sampling,
            document=self.prefixes.beginning(shared),
            on_text=on_text,
            on_end=lambda row, answer: on_end(row, answer, texts[row]),
            least_rows=least_rows,
        )
        return answers, texts

    def _scored(
        self,
        job: GenerationJob,
        prompts: list[Prompt],
        answers: list[Completion],
        texts: list[AnswerText],
        document: Document | None,
    ) -> list[list[ScoredToken]]:
        """Tokens of each prompt and answer with log probabilities, from a second pass."""
        document = None if job.echo else document
        read = 0 if document is None else document.length
        wholes = [[*p.tokens, *a.tokens] for p, a in zip(prompts, answers, strict=True)]
        firsts = [1 if job.echo else len(prompt.tokens) for prompt in prompts]
        pairs = [(whole[read:first], whole[first:]) for whole, first in zip(wholes, firsts, strict=True)]
        asked = [pair for pair in pairs if pair[1]]
        scores = iter(self._engine.score(asked, document=document) if asked else ())
        rows = []
        for prompt, whole, (_, continuation), text in zip(prompts, wholes, pairs, texts, strict=True):
            score = next(scores) if continuation else Score([], [], [], [])
            shown, offset = (prompt.added, 0) if job.echo else (len(prompt.tokens), len(prompt.text))
            found = _scored_tokens(self._tokenizer, whole, score, shown, offset)
            end = len(prompt.text) + len(text.text)
            # Tokens of a stop string were generated, but are not part of the answer.
            rows.append([token for token in found if not text.stopped or token.offset < end])
        return rows


def _generated(
    job: GenerationJob,
    prompt: Prompt,
    answer: Completion,
    text: AnswerText,
    scored: list[ScoredToken] | None = None,
) -> GeneratedText:
    whole = prompt.text + text.text if job.echo else text.text
    ended = "stop" if text.stopped or answer.ended == "stop" else "length"
    return GeneratedText(whole, ended, len(answer.tokens), scored)


def _scored_tokens(
    tokenizer: Tokenizer, tokens: Sequence[int], score: Score, shown: int, offset: int
) -> Iterator[ScoredToken]:
    """Yields the tokens from index ``shown`` on, which has ``offset`` characters before it.

    ``score`` is that of the last tokens.
    """
    decode = partial(tokenizer.decode, skip_special=False)
    pieces = IncrementalDetokenizer(decode, tokens[:shown])
    for place in range(shown, len(tokens)):
        text = pieces.add(tokens[place])
        if place + 1 == len(tokens):
            text += pieces.rest()
        index = place - (len(tokens) - len(score.tokens))
        if index < 0:
            yield ScoredToken(text, offset)
        else:
            likeliest = decode([score.likeliest[index]]), score.likeliest_log_probabilities[index]
            yield ScoredToken(text, offset, score.log_probabilities[index], likeliest)
        offset += len(text)
