"""Prompts to answers, and to the log probabilities of every token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.data.text.conversation_tokens import prompt_ids
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError
from agentic_ring.inference import Completion, Document, Sampling, Score, TextEngine
from agentic_ring.inference.detokenizer import AnswerText, generate_answers
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.serve.scored_tokens import ScoredToken, scored_tokens

OnText = Callable[[str], None]


class ContextLengthError(ArgumentError):
    """A prompt and its answer are longer than the server takes."""


@dataclass(frozen=True)
class Prompt:
    """What is to be gone on from.

    Attributes:
      tokens: all of them.
      text: as it was given, or as the tokens are spelled; of a chat, which is never echoed, none.
      added: tokens at the front that were not given, but belong there: that which begins a text.
    """

    tokens: Sequence[int]
    text: str
    added: int = 0


@dataclass(frozen=True)
class Job:
    """What to write.

    Attributes:
      prompts: at least one.
      max_new_tokens: of each answer; 0 for none.
      sampling: how tokens are chosen.
      stop: strings that end an answer and are left out of it.
      echo: put the prompt before the answer.
      scored: tell log probabilities.
      spaced: the answer's text goes on from the prompt's, with the space between the two; else it is a
        text of its own.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    echo: bool = False
    scored: bool = False
    spaced: bool = True


@dataclass(frozen=True)
class Written:
    """What came of a prompt.

    Attributes:
      text: with the prompt's before it, where that was asked for.
      ended: why the answer ends.
      tokens: of the answer.
      scored: of the answer, and of the prompt where that is part of the text; None if not asked for.
    """

    text: str
    ended: Literal["stop", "length"]
    tokens: int
    scored: list[ScoredToken] | None


class Writer:
    """Writes with one model, one job at a time.

    Args:
      engine: that reads and writes.
      tokenizer: of its model.
      max_context: tokens of a prompt and its answer at most.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer, max_context: int):
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._last = PrefixCache(engine)

    def prompt(self, given: str | Sequence[int]) -> Prompt:
        """A text, or tokens, which are taken as they are."""
        if not isinstance(given, str):
            return Prompt(given, self._tokenizer.decode(given, skip_special=False))
        tokens = self._tokenizer.encode_prompt(given)
        added = len(tokens) - len(self._tokenizer.encode(given))
        return Prompt(tokens, given, added)

    def chat_prompt(self, template: ChatTemplate, turns: Sequence[Turn]) -> Prompt:
        """A conversation that ends with the user's turn, as the model was trained on it.

        Raises:
          DataError: it is none.
        """
        return Prompt(prompt_ids(self._tokenizer, template, turns), "")

    def room(self, prompt: Prompt) -> int:
        """Tokens that an answer may have."""
        return self._max_context - len(prompt.tokens)

    def check(self, job: Job) -> None:
        """Checks what can be checked before a job's turn comes.

        Raises:
          ContextLengthError: a prompt and its answer are too long.
        """
        for prompt in job.prompts:
            if self.room(prompt) < job.max_new_tokens:
                raise ContextLengthError(
                    f"the prompt has {len(prompt.tokens)} tokens and {job.max_new_tokens} new ones are asked "
                    f"for; together they may be {self._max_context}"
                )

    def write(
        self, job: Job, on_text: OnText = lambda text: None, alive: Callable[[], None] = lambda: None
    ) -> list[Written]:
        """Answers to all prompts of a job that ``check`` passed.

        Args:
          job: what to write.
          on_text: called with each piece of text of a single prompt's answer, as it comes.
          alive: called now and then; whatever it raises ends the work.

        Raises:
          ArgumentError: an empty prompt, or a token that is not of the vocabulary.
        """
        return [written for group in self._groups(job) for written in self._write(job, group, on_text, alive)]

    def _groups(self, job: Job) -> Iterator[list[Prompt]]:
        """Prompts that fit into memory together: as much as one of the longest."""
        group: list[Prompt] = []
        for prompt in job.prompts:
            longest = max(len(each.tokens) for each in (*group, prompt)) + job.max_new_tokens
            if group and longest * (len(group) + 1) > self._max_context:
                yield group
                group = []
            group.append(prompt)
        yield group

    def _write(
        self, job: Job, prompts: list[Prompt], on_text: OnText, alive: Callable[[], None]
    ) -> list[Written]:
        document, rests = None, [prompt.tokens for prompt in prompts]
        if len(prompts) == 1 and job.max_new_tokens:
            document, rest = self._last.split(prompts[0].tokens, lambda done: alive())
            rests = [rest]
        texts = [
            AnswerText(self._tokenizer.decode, prompt.tokens if job.spaced else (), job.stop)
            for prompt in prompts
        ]

        def on_part(text: str) -> None:
            alive()
            on_text(text)

        answers = [Completion(ended="length") for _ in prompts]
        if job.max_new_tokens:
            answers = generate_answers(
                self._engine,
                self._tokenizer,
                rests,
                texts,
                job.max_new_tokens,
                job.sampling,
                job.stop,
                document=document,
                on_text=on_part,
            )
        alive()
        scored = self._scored(job, prompts, answers, texts, document)
        return [
            Written(
                (prompt.text if job.echo else "") + text.text,
                "stop" if text.stopped or answer.ended == "stop" else "length",
                len(answer.tokens),
                tokens,
            )
            for prompt, answer, text, tokens in zip(prompts, answers, texts, scored, strict=True)
        ]

    def _scored(
        self,
        job: Job,
        prompts: list[Prompt],
        answers: list[Completion],
        texts: list[AnswerText],
        document: Document | None,
    ) -> Iterator[list[ScoredToken] | None]:
        """Of each prompt, read once more: whole where its own tokens are asked for."""
        if not job.scored:
            yield from [None] * len(prompts)
            return
        wholes = [[*p.tokens, *a.tokens] for p, a in zip(prompts, answers, strict=True)]
        firsts = [1 if job.echo else len(prompt.tokens) for prompt in prompts]
        scores = self._scores(wholes, firsts, None if job.echo else document)
        for prompt, whole, score, text in zip(prompts, wholes, scores, texts, strict=True):
            shown, offset = (prompt.added, 0) if job.echo else (len(prompt.tokens), len(prompt.text))
            found = scored_tokens(self._tokenizer, whole, score, shown, offset)
            end = len(prompt.text) + len(text.text)
            # Tokens of a stop string were written, but are not part of the answer.
            yield [token for token in found if not text.stopped or token.offset < end]

    def _scores(
        self, wholes: list[list[int]], firsts: list[int], document: Document | None
    ) -> Iterator[Score]:
        """Of the tokens from number ``first`` on, of which there may be none."""
        read = 0 if document is None else document.length
        pairs = [(whole[read:first], whole[first:]) for whole, first in zip(wholes, firsts, strict=True)]
        asked = [pair for pair in pairs if pair[1]]
        scores = iter(self._engine.score(asked, document=document) if asked else ())
        for _, continuation in pairs:
            yield next(scores) if continuation else Score([], [], [], [])
