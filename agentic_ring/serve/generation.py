"""Text generation for requests: answers to prompts, and log probabilities of their tokens."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.detokenizer import AnswerText, IncrementalDetokenizer, generate_answers
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.inference.text_engine import Completion, Document, Score, TextEngine
from agentic_ring.serve.jobs import GenerationJob, GenerationRequest
from agentic_ring.serve.prompts import TOKENS, ContextLengthError, Prompt
from agentic_ring.serve.request_batch import RequestBatch
from agentic_ring.serve.request_queue import Finish, Take


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


@dataclass(frozen=True)
class GeneratedText:
    """The answer to a prompt.

    Attributes:
      text: the answer, after the prompt if the job has ``echo``.
      tokens: number of tokens of the answer.
      scored: tokens of ``text`` with log probabilities; None unless requested.
    """

    text: str
    ended: Literal["stop", "length"]
    tokens: int
    scored: list[ScoredToken] | None


class TextGenerator:
    """Answers jobs with one model, those together that continue the same text.

    Args:
      max_context: maximum number of tokens of a prompt and its answer together.
      batch_size: maximum number of jobs that are answered together.

    Attributes:
      prefixes: cache of the last long prompt.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer, max_context: int, batch_size: int = 8):
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._batch_size = batch_size
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

    def answer(
        self,
        request: GenerationRequest,
        take: Take[GenerationRequest],
        finish: Finish[GenerationRequest, list[GeneratedText]],
    ) -> int:
        """Answers a request whose job has passed ``check``, and others that continue the same text.

        Each gets the answer that it would get alone. The others are chosen once the text is encoded.

        Returns:
          The number of requests.

        Raises:
          AbandonedError: the client of a request that is answered alone has left.
        """
        request.check_connected()
        if not request.job.is_single:
            finish(request, self._answer_alone(request))
            return 1
        batch = RequestBatch(self.prefixes, self._batch_size, self._max_context)
        batch.start(request)
        take(batch.admit)
        self._answer_together(batch, finish)
        return len(batch.requests)

    def _answer_together(
        self, batch: RequestBatch, finish: Finish[GenerationRequest, list[GeneratedText]]
    ) -> None:
        jobs = [request.job for request in batch.requests]
        texts = [job.answer_text(job.prompts[0], self._tokenizer) for job in jobs]

        def on_text(row: int, text: str) -> bool:
            batch.requests[row].on_text(text)
            return batch.requests[row].has_left()

        def on_end(row: int, answer: Completion) -> None:
            finish(batch.requests[row], [_generated(jobs[row], jobs[row].prompts[0], answer, texts[row])])

        generate_answers(
            self._engine,
            self._tokenizer,
            [job.prompts[0].tokens[batch.shared :] for job in jobs],
            texts,
            [job.max_new_tokens for job in jobs],
            [job.sampling for job in jobs],
            document=self.prefixes.beginning(batch.shared),
            on_text=on_text,
            on_end=on_end,
            least_rows=self._batch_size if len(jobs) > 1 else 1,
        )

    def _answer_alone(self, request: GenerationRequest) -> list[GeneratedText]:
        return [text for group in self._groups(request.job) for text in self._answer_group(request, group)]

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
        job, document, rests = request.job, None, [prompt.tokens for prompt in prompts]
        if len(prompts) == 1 and job.max_new_tokens:
            document, rest = self.prefixes.split(prompts[0].tokens, lambda done: request.check_connected())
            rests = [rest]
        texts = [job.answer_text(prompt, self._tokenizer) for prompt in prompts]
        answers = [Completion(ended="length") for _ in prompts]
        if job.max_new_tokens:
            answers = generate_answers(
                self._engine,
                self._tokenizer,
                rests,
                texts,
                job.max_new_tokens,
                job.sampling,
                document=document,
                on_text=lambda row, text: request.has_left(),
            )
        request.check_connected()
        scored = self._scored(job, prompts, answers, texts, document)
        return [_generated(job, *row) for row in zip(prompts, answers, texts, scored, strict=True)]

    def _scored(
        self,
        job: GenerationJob,
        prompts: list[Prompt],
        answers: list[Completion],
        texts: list[AnswerText],
        document: Document | None,
    ) -> Iterator[list[ScoredToken] | None]:
        """Tokens with log probabilities of each prompt, from a second pass; None if not requested."""
        if not job.scored:
            yield from [None] * len(prompts)
            return
        wholes = [[*p.tokens, *a.tokens] for p, a in zip(prompts, answers, strict=True)]
        firsts = [1 if job.echo else len(prompt.tokens) for prompt in prompts]
        scores = self._scores(wholes, firsts, None if job.echo else document)
        for prompt, whole, score, text in zip(prompts, wholes, scores, texts, strict=True):
            shown, offset = (prompt.added, 0) if job.echo else (len(prompt.tokens), len(prompt.text))
            found = _scored_tokens(self._tokenizer, whole, score, shown, offset)
            end = len(prompt.text) + len(text.text)
            # Tokens of a stop string were generated, but are not part of the answer.
            yield [token for token in found if not text.stopped or token.offset < end]

    def _scores(
        self, wholes: list[list[int]], firsts: list[int], document: Document | None
    ) -> Iterator[Score]:
        """Scores of the tokens from index ``first`` on; empty if there are none."""
        read = 0 if document is None else document.length
        pairs = [(whole[read:first], whole[first:]) for whole, first in zip(wholes, firsts, strict=True)]
        asked = [pair for pair in pairs if pair[1]]
        scores = iter(self._engine.score(asked, document=document) if asked else ())
        for _, continuation in pairs:
            yield next(scores) if continuation else Score([], [], [], [])


def _generated(
    job: GenerationJob,
    prompt: Prompt,
    answer: Completion,
    text: AnswerText,
    scored: list[ScoredToken] | None = None,
) -> GeneratedText:
    return GeneratedText(
        (prompt.text if job.echo else "") + text.text,
        "stop" if text.stopped or answer.ended == "stop" else "length",
        len(answer.tokens),
        scored,
    )


def _scored_tokens(
    tokenizer: Tokenizer, tokens: Sequence[int], score: Score, shown: int, offset: int
) -> Iterator[ScoredToken]:
    """Yields the tokens from index ``shown`` on.

    Args:
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
