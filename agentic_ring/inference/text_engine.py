"""Text generation and scoring with a LLaMA: a document is encoded once, and many prompts continue it.

    document   | chunk | chunk | chunk |            encoded once, sharded over the ring, of one row
    prompt 0                           | q q q q | a a a
    prompt 1                           | q q     | a a a a a          each with a short cache of its own
    prompt 2                           | q q q   | a

Every prompt attends to the one stored copy of the document. Results depend neither on the ring, nor on the
chunk size, nor on other prompts in the batch: each slot of a cache carries the position of its token, and
padding has none. (One exception: in a cache of fewer bits than the model's dtype, a chunk attends to its own
tokens before rounding and to earlier ones after it, so the chunk size changes the rounding.)
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.attention.cache import EMPTY_SLOT, KVCache
from agentic_ring.attention.cache.kv_cache import CacheDtype
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.inference.llama_programs import LlamaPrograms, RaggedBatch, Tokens, bucket_size
from agentic_ring.inference.sampling import Sampling
from agentic_ring.mesh import make_mesh
from agentic_ring.models.llama import Llama

PROMPT_UNIT, ANSWER_UNIT = 8, 32
"""Multiples to which the lengths of short prompts and of answers are rounded up; the first, unless the ring
needs more. Padding of a prompt is computed, that of an answer only takes memory."""


@dataclass(frozen=True)
class Document:
    """An encoded text that any number of prompts may continue."""

    cache: KVCache
    """Keys and values, one row."""
    length: int
    """Number of tokens."""
    next_logits: jax.Array | None
    """float32 [1, V] of the token after it; None for the beginning of a longer document."""

    def beginning(self, length: int) -> "Document":
        """The first ``length`` tokens as a document that shares this one's memory.

        Raises:
          ArgumentError: ``length`` is below 1 or above the document's length.
        """
        if not 1 <= length <= self.length:
            raise ArgumentError(f"a beginning of {length} tokens; the document has {self.length}")
        if length == self.length:
            return self
        positions = self.cache.positions
        kept = jnp.where(positions < length, positions, EMPTY_SLOT)
        return Document(replace(self.cache, positions=kept), length, None)


@dataclass
class Completion:
    """Tokens generated after a prompt."""

    tokens: list[int] = field(default_factory=list)
    """Without the final stop token."""
    log_probabilities: list[float] = field(default_factory=list)
    """Of each token under the model, before temperature and top-p."""
    ended: Literal["stop", "length"] | None = None
    """"stop" at a stop token or string, "length" at the limit of new tokens; None while incomplete."""
    stop_token: int | None = None
    """The stop token, if it ended with one."""


@dataclass(frozen=True)
class Score:
    """Log probabilities of the ``tokens`` of a continuation, in nats."""

    tokens: list[int]
    log_probabilities: list[float]
    """Of each token given all earlier ones."""
    likeliest: list[int]
    """Most likely token at each place."""
    likeliest_log_probabilities: list[float]

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.tokens == self.likeliest

    @property
    def total(self) -> float:
        """Log probability of the whole continuation, in nats."""
        return sum(self.log_probabilities)


@dataclass(frozen=True)
class DocumentBytes:
    """Memory needed to encode a document, in bytes, summed over all devices."""

    weights: int
    """The model, each weight counted once."""
    cache: int
    """Keys and values."""
    activations: int
    """Temporary memory while a chunk is encoded, from the compiled program."""

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.weights + self.cache + self.activations


@dataclass(frozen=True)
class TextEngine:
    """Encodes, generates and scores text with one model.

    Attributes:
      model: the model; its weights may lie on any devices.
      mesh: the model's sharding rules say which axes shard documents and prompts; None uses one device.
      chunk: tokens to encode at a time, a multiple of the ring; activation memory grows with it.
      cache_dtype: storage dtype of keys and values; None uses the model's dtype.

    Raises:
      ConfigError: the chunk does not divide over the ring.
    """

    model: Llama
    mesh: Mesh | None = None
    chunk: int = 1024
    cache_dtype: CacheDtype | None = None

    def __post_init__(self) -> None:
        ring = self.programs.ring
        if self.chunk < 1 or self.chunk % ring:
            raise ConfigError(
                f"chunk {self.chunk} is not a positive multiple of the ring of {ring} devices; choose "
                "one that is"
            )

    def read(self, tokens: Tokens, advance: Callable[[int], None] = lambda done: None) -> Document:
        """Encodes a text; ``advance`` is called after each chunk with the number of tokens encoded so far.

        Raises:
          ArgumentError: there is no token, or one outside the vocabulary.
        """
        self.check([tokens])
        programs = self.programs
        # Every group of devices along data and fsdp encodes a copy.
        rows = RaggedBatch([tokens] * programs.copies, 0, self.chunk, unit=self.chunk)
        with jax.set_mesh(programs.mesh):
            cache = programs.empty(programs.copies, bucket_size(len(tokens), self.chunk))
            last, done = programs.nothing_read(programs.copies), 0
            for chunk in rows.chunks():
                arguments = programs.weights, chunk.tokens, chunk.positions
                done = min(done + self.chunk, len(tokens))
                if done < len(tokens):
                    cache = programs.store(*arguments, cache)
                else:
                    last, cache = programs.encode(*arguments, chunk.place_of_last, last, cache, None)
                jax.block_until_ready(cache)
                advance(done)
            logits, cache = programs.first_row(programs.weights, cache, last)
        return Document(cache, len(tokens), logits)

    def adopt(self, document: Document) -> Document:
        """Copies a document of another engine with the same model to this engine's devices.

        This allows prefill-decode disaggregation (arXiv 2401.09670): encoding uses many devices well,
        while a single token is decoded faster on few.

        Raises:
          ArgumentError: the document's cache does not divide over this engine's ring.
        """
        whole = NamedSharding(self.programs.mesh, PartitionSpec())
        logits = jax.device_put(document.next_logits, whole)  # or None, which stays
        return replace(document, cache=self.programs.place(document.cache), next_logits=logits)

    def generate(
        self,
        prompts: Sequence[Tokens],
        max_new_tokens: int | Sequence[int],
        *,
        document: Document | None = None,
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        stop_tokens: Sequence[Collection[int]] | None = None,
        on_token: Callable[[int, int], object] = lambda row, token: None,
        on_end: Callable[[int, Completion], object] = lambda row, answer: None,
        least_rows: int = 1,
    ) -> list[Completion]:
        """Generates an answer to each prompt, all prompts in one batch.

        Args:
          prompts: prompts of any lengths, at least one token each.
          max_new_tokens: limit of each answer; one for all, or one for each.
          document: text before every prompt.
          sampling: one for all prompts, or one for each, which then draws as it does for a prompt alone.
          stop_tokens: for each prompt, the tokens that end its answer; they are not part of it.
          on_token: called with the prompt's index and each new token of its answer, which ends if the call
            returns true.
          on_end: called with the prompt's index and its answer as soon as that is complete.
          least_rows: fewer prompts are padded to so many rows, so that they share one compiled program.

        Raises:
          ArgumentError: there is no prompt, a prompt is empty, a token is outside the vocabulary,
            ``max_new_tokens`` is below 1, or there is not one of what has one for each prompt.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        if min(limits, default=1) < 1:
            raise ArgumentError(f"max_new_tokens is {min(limits)}; it must be at least 1")
        stops = [()] * len(prompts) if stop_tokens is None else stop_tokens
        for name, each in (("max_new_tokens", limits), ("sampling", sampling), ("stop_tokens", stops)):
            if not isinstance(each, Sampling) and len(each) != len(prompts):
                raise ArgumentError(f"{len(each)} {name} for {len(prompts)} prompts; give one for each")
        self.check(prompts)
        programs, texts = self.programs, self._ragged(prompts, document, least_rows)
        prefix = None if document is None else document.cache
        answers, batch = [Completion() for _ in prompts], len(texts.rows)

        def receive(tokens: np.ndarray, likelihoods: np.ndarray) -> np.ndarray:
            """Adds a token [B] to each answer that has not ended; returns those that go on, bool [B]."""
            for row, answer in enumerate(answers):  # rows of padding come after them
                if answer.ended is not None:
                    continue
                token = int(tokens[row])
                if token in stops[row]:
                    answer.ended, answer.stop_token = "stop", token
                else:
                    answer.tokens.append(token)
                    answer.log_probabilities.append(float(likelihoods[row]))
                    if on_token(row, token):
                        answer.ended = "stop"
                    elif len(answer.tokens) == limits[row]:
                        answer.ended = "length"
                if answer.ended is not None:
                    on_end(row, answer)
            return np.array([row < len(answers) and answers[row].ended is None for row in range(batch)])

        # Rows of one sampling draw by their number; each of several as alone, and rows of padding are greedy.
        one = isinstance(sampling, Sampling)
        numbers = np.arange(batch, dtype=np.int32) if one else np.zeros(batch, np.int32)
        draws = [sampling] * batch if one else [*sampling, *[Sampling()] * (batch - len(sampling))]
        values = Sampling.stacked(draws)
        with jax.set_mesh(programs.mesh):
            cache = programs.empty(batch, sum(texts.sizes), bucket_size(max(limits), ANSWER_UNIT))
            last = programs.nothing_read(batch)
            for chunk in texts.chunks():
                last, cache = programs.encode(
                    programs.weights, chunk.tokens, chunk.positions, chunk.place_of_last, last, cache, prefix
                )
            tokens, likelihoods = programs.sample(programs.weights, last, values, numbers, np.int32(0))
            index = 0
            while True:
                working = receive(np.asarray(tokens), np.asarray(likelihoods))
                if not working.any():
                    return answers
                positions = np.where(working, texts.start + texts.lengths + index, EMPTY_SLOT)
                index += 1
                state = programs.weights, tokens, positions.astype(np.int32), cache, prefix
                tokens, likelihoods, cache = programs.next_token(*state, values, numbers, np.int32(index))

    def score(
        self, pairs: Sequence[tuple[Tokens, Tokens]], *, document: Document | None = None
    ) -> list[Score]:
        """Computes the log probability of each continuation after its context.

        Args:
          pairs: (context, continuation); a context may be empty only after a complete ``document``.
          document: text before every context.

        Raises:
          ArgumentError: there is no pair, a continuation is empty or has nothing before it, or a token is
            outside the vocabulary.
        """
        for context, continuation in pairs:
            if not len(continuation):
                raise ArgumentError("a continuation is empty; give each at least one token")
            if not len(context) and (document is None or document.next_logits is None):
                raise ArgumentError(
                    "a continuation has nothing before it; give its context at least one token"
                )
        rows = [[*context, *continuation] for context, continuation in pairs]
        self.check(rows)
        programs, texts = self.programs, self._ragged(rows, document)
        prefix = None if document is None else document.cache
        found = []
        with jax.set_mesh(programs.mesh):
            cache = programs.empty(len(texts.rows), sum(texts.sizes))
            for chunk in texts.chunks():
                *parts, cache = programs.score(
                    programs.weights, chunk.tokens, chunk.positions, chunk.targets, cache, prefix
                )
                found.append([np.asarray(part) for part in parts])
        # From each row's second token to its last; the first one is predicted before the row.
        columns = [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]
        scores = []
        for number, (context, continuation) in enumerate(pairs):
            places = slice(max(len(context) - 1, 0), len(context) + len(continuation) - 1)
            values = [column[number, places].tolist() for column in columns]
            if document is not None and document.next_logits is not None and not len(context):
                opening = np.asarray(jax.nn.log_softmax(document.next_logits[0]))
                first = opening[continuation[0]], opening.argmax(), opening.max()
                for column, value in zip(values, first, strict=True):
                    column.insert(0, value.item())
            scores.append(Score(list(continuation), *values))
        return scores

    def document_bytes(self, tokens: int) -> DocumentBytes:
        """Memory needed to encode a document of ``tokens`` tokens."""
        slots = bucket_size(tokens, self.chunk)
        with jax.set_mesh(self.programs.mesh):
            cache, activations = self.programs.encode_bytes(slots)
        return DocumentBytes(self.programs.weight_bytes, cache, activations)

    def check(self, texts: Sequence[Tokens]) -> None:
        """Raises an ArgumentError unless there are texts, none is empty, and all tokens are the model's."""
        vocabulary = self.model.config.vocab_size
        if not len(texts) or not all(len(text) for text in texts):
            raise ArgumentError("there is no text, or one is empty; give each at least one token")
        for text in map(np.asarray, texts):
            for token in (text.min(), text.max()):
                if not 0 <= token < vocabulary:
                    raise ArgumentError(
                        f"token {token} is outside the model's vocabulary of {vocabulary}; use the tokenizer "
                        "that belongs to the model"
                    )

    @cached_property
    def programs(self) -> LlamaPrograms:
        """The compiled functions."""
        mesh = make_mesh(devices=jax.devices()[:1]) if self.mesh is None else self.mesh
        return LlamaPrograms(self.model, mesh, self.cache_dtype, self.chunk)

    def _ragged(self, rows: Sequence[Tokens], document: Document | None, least_rows: int = 1) -> RaggedBatch:
        """The rows, padded with empty ones to a batch size that fits the mesh and limits recompilation."""
        programs = self.programs
        count = bucket_size(max(len(rows), least_rows), programs.copies, steps=2)
        unit = -(-PROMPT_UNIT // programs.ring) * programs.ring
        start = 0 if document is None else document.length
        return RaggedBatch([*rows, *[()] * (count - len(rows))], start, self.chunk, unit)
