"""Writing with a LLaMA: documents are encoded once, in chunks, and any number of prompts goes on from them.

    document   | chunk | chunk | chunk |            encoded once, sharded over the ring, of one row
    prompt 0                           | q q q q | a a a
    prompt 1                           | q q     | a a a a a          each with a short cache of its own
    prompt 2                           | q q q   | a

Every prompt attends to the document where it lies. What is computed depends neither on the ring, nor on
chunks, nor on what else is in a batch: each slot of a cache carries the position of its token, and padding
has none. (Where a cache is kept in fewer bits than the model's, a chunk attends to its own tokens before they
are rounded and to earlier ones after, so that there the chunk's size shows.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.attention.cache import EMPTY_SLOT, KVCache
from agentic_ring.attention.cache.storage import CacheDtype
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.inference.programs import Programs
from agentic_ring.inference.ragged import Ragged, Tokens, bucket
from agentic_ring.inference.sampling import Sampling
from agentic_ring.mesh import make_mesh
from agentic_ring.models.llama import Llama

PROMPT_UNIT = 32
"""Tokens that short prompts and answers are rounded up to, unless the ring asks for more."""

Ending = Literal["stop", "length"]


@dataclass(frozen=True)
class Document:
    """A text that has been read; any number of prompts may go on from it.

    Attributes:
      cache: its keys and values, of one row.
      length: its tokens.
      next_logits: float32 [1, V], of the token after it; None for a document's beginning.
    """

    cache: KVCache
    length: int
    next_logits: jax.Array | None

    def beginning(self, length: int) -> "Document":
        """Its first tokens as a document, for prompts that share no more; it takes no memory of its own.

        Raises:
          ArgumentError: fewer than 1 token, or more than it has.
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
    """What was written after a prompt.

    Attributes:
      tokens: without the stop token that ended them.
      log_probabilities: of each, under the model itself.
      ended: "stop" at a stop token or string, "length" where there was no room for more; None while it is
        being written.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    ended: Ending | None = None


@dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
      tokens: that were scored.
      log_probabilities: of each of them, given all before it, in nats.
      likeliest: the likeliest token in the place of each.
      likeliest_log_probabilities: of these.
    """

    tokens: list[int]
    log_probabilities: list[float]
    likeliest: list[int]
    likeliest_log_probabilities: list[float]

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.tokens == self.likeliest

    @property
    def total(self) -> float:
        """Log probability of the whole continuation, in nats."""
        return sum(self.log_probabilities)


@dataclass(frozen=True)
class TextEngine:
    """Reads, writes and scores with one model.

    Attributes:
      model: its weights wherever they are.
      mesh: whose ring shares documents out, and whose data and fsdp axes share prompts out; one device
        where absent.
      chunk: tokens of a text that are encoded at a time, a multiple of the ring; memory beside the cache
        grows with it.
      cache_dtype: how keys and values are kept; the model's dtype where absent.

    Raises:
      ConfigError: a chunk that does not divide over the ring.
    """

    model: Llama
    mesh: Mesh | None = None
    chunk: int = 1024
    cache_dtype: CacheDtype | None = None

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.chunk % self._ring:
            raise ConfigError(
                f"chunk {self.chunk} is no positive multiple of the ring of {self._ring} devices; choose "
                "one that is"
            )

    def read(self, tokens: Tokens, advance: Callable[[int], None] = lambda done: None) -> Document:
        """Encodes a text once.

        Args:
          tokens: at least one.
          advance: called with the number of tokens that have been read, after each chunk.

        Raises:
          ArgumentError: no token, or one that is not of the vocabulary.
        """
        self._check([tokens])
        programs = self.programs
        # Every group of devices that shares prompts out encodes a copy.
        rows = Ragged([tokens] * self._copies, 0, self.chunk, unit=self.chunk)
        with jax.set_mesh(self._mesh):
            cache = programs.empty(self._copies, bucket(len(tokens), self.chunk))
            last = programs.nothing_read(self._copies)
            for piece in rows.pieces():
                last, cache = programs.encode(
                    programs.weights, piece.tokens, piece.positions, piece.place_of_last, last, cache, None
                )
                last.block_until_ready()
                advance(min(piece.first + piece.size, len(tokens)))
            logits, cache = programs.first_row(programs.weights, cache, last)
        return Document(cache, len(tokens), logits)

    def adopt(self, document: Document) -> Document:
        """A document that another engine read with the same model, on this engine's devices.

        What reads fastest need not write fastest: reading keeps many devices busy, while a single token
        passes through few of them faster ("prefill-decode disaggregation", arXiv 2401.09670).

        Raises:
          ArgumentError: its cache does not divide over this engine's ring.
        """
        logits = document.next_logits
        if logits is not None:
            logits = jax.device_put(logits, NamedSharding(self._mesh, PartitionSpec()))
        return replace(document, cache=self.programs.place(document.cache), next_logits=logits)

    def generate(
        self,
        prompts: Sequence[Tokens],
        max_new_tokens: int,
        *,
        document: Document | None = None,
        sampling: Sampling = Sampling(),
        stop_tokens: Sequence[int] = (),
        stop: Callable[[list[int]], bool] = lambda tokens: False,
        on_token: Callable[[int, int], None] = lambda row, token: None,
    ) -> list[Completion]:
        """Writes on after each prompt; all are worked on at once.

        Args:
          prompts: of any lengths, at least one token each.
          max_new_tokens: of an answer.
          document: what stands before every prompt.
          sampling: how tokens are chosen.
          stop_tokens: each of them ends an answer and is left out of it.
          stop: whether an answer ends here, from all of its tokens so far; see ``stop_at``.
          on_token: called with a prompt's number and each new token of its answer, as they come.

        Raises:
          ArgumentError: no prompt, an empty one, a token that is not of the vocabulary, or no room for
            an answer.
        """
        if max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        self._check(prompts)
        programs, texts = self.programs, self._ragged(prompts, document)
        prefix = None if document is None else document.cache
        answers = [Completion() for _ in prompts]
        batch = len(texts.rows)
        numbers = np.arange(batch, dtype=np.int32)
        with jax.set_mesh(self._mesh):
            cache = programs.empty(batch, sum(texts.sizes), bucket(max_new_tokens, PROMPT_UNIT))
            last = programs.nothing_read(batch)
            for piece in texts.pieces():
                last, cache = programs.encode(
                    programs.weights, piece.tokens, piece.positions, piece.place_of_last, last, cache, prefix
                )
            tokens, likelihoods = programs.first_token(programs.weights, last, sampling.values, numbers)
            for index in range(max_new_tokens):
                for number, (token, likelihood) in enumerate(
                    zip(np.asarray(tokens).tolist(), np.asarray(likelihoods).tolist(), strict=True)
                ):
                    if number >= len(answers) or answers[number].ended is not None:
                        continue
                    if _add(answers[number], token, likelihood, stop_tokens, stop):
                        on_token(number, token)
                working = np.zeros(batch, bool)
                working[: len(answers)] = [answer.ended is None for answer in answers]
                if not working.any() or index + 1 == max_new_tokens:
                    break
                positions = np.where(working, texts.start + texts.lengths + index, EMPTY_SLOT)
                tokens, likelihoods, cache = programs.next_token(
                    programs.weights,
                    tokens,
                    positions.astype(np.int32),
                    cache,
                    prefix,
                    sampling.values,
                    numbers,
                    np.int32(index + 1),
                )
        for answer in answers:
            answer.ended = answer.ended or "length"
        return answers

    def score(
        self, pairs: Sequence[tuple[Tokens, Tokens]], *, document: Document | None = None
    ) -> list[Score]:
        """How likely each continuation is after its context.

        Args:
          pairs: of context and continuation; a context may be empty only where a document that was read to
            its end stands before it.
          document: what stands before every context.

        Raises:
          ArgumentError: no pair, an empty continuation or one with nothing before it, or a token that is
            not of the vocabulary.
        """
        for context, continuation in pairs:
            if not len(continuation):
                raise ArgumentError("a continuation is empty; give each at least one token")
            if not len(context) and (document is None or document.next_logits is None):
                raise ArgumentError(
                    "a continuation has nothing before it; give its context at least one token"
                )
        rows = [[*context, *continuation] for context, continuation in pairs]
        self._check(rows)
        programs, texts = self.programs, self._ragged(rows, document)
        prefix = None if document is None else document.cache
        found = []
        with jax.set_mesh(self._mesh):
            cache = programs.empty(len(texts.rows), sum(texts.sizes))
            for piece in texts.pieces():
                *parts, cache = programs.score(
                    programs.weights, piece.tokens, piece.positions, piece.targets, cache, prefix
                )
                found.append([np.asarray(part) for part in parts])
        # Of each row's second token to its last; what predicts the first stands before the row.
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

    def document_bytes(self, tokens: int) -> "DocumentBytes":
        """What reading a document of so many tokens takes, before it is read."""
        slots = bucket(tokens, self.chunk)
        with jax.set_mesh(self._mesh):
            return DocumentBytes(
                weights=sum(leaf.nbytes for leaf in jax.tree.leaves(self.programs.weights)),
                cache=self.programs.cache_bytes(self._copies, slots),
                activations=self.programs.encode_bytes(self._copies, slots) * self._mesh.size,
            )

    @cached_property
    def programs(self) -> Programs:
        """What runs on the devices."""
        return Programs(self.model, self._mesh, self.chunk, self.cache_dtype)

    @cached_property
    def _mesh(self) -> Mesh:
        return make_mesh(devices=jax.devices()[:1]) if self.mesh is None else self.mesh

    @property
    def _ring(self) -> int:
        return self._mesh.shape["ring"]

    @property
    def _copies(self) -> int:
        """Groups of devices that rows are shared out over."""
        return self._mesh.shape["data"] * self._mesh.shape["fsdp"]

    def _ragged(self, rows: Sequence[Tokens], document: Document | None) -> Ragged:
        """The rows, and empty ones up to a size that the mesh and few programs can serve."""
        count = bucket(len(rows), self._copies, steps=2)
        unit = -(-PROMPT_UNIT // self._ring) * self._ring
        start = 0 if document is None else document.length
        return Ragged([*rows, *[()] * (count - len(rows))], start, self.chunk, unit)

    def _check(self, rows: Sequence[Tokens]) -> None:
        vocabulary = self.model.config.vocab_size
        if not len(rows) or not all(len(row) for row in rows):
            raise ArgumentError("there is no text, or an empty one; give each at least one token")
        for row in rows:
            for token in (min(row), max(row)):
                if not 0 <= token < vocabulary:
                    raise ArgumentError(
                        f"token {token} is not of the model's vocabulary of {vocabulary}; the tokenizer is "
                        "another model's"
                    )


@dataclass(frozen=True)
class DocumentBytes:
    """What it takes to read a document, in bytes on all devices together.

    Attributes:
      weights: of the model, each counted once.
      cache: keys and values.
      activations: what is alive besides while a chunk is encoded, as it is compiled.
    """

    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.activations


def stop_at(strings: Sequence[str], decode: Callable[[list[int]], str]) -> Callable[[list[int]], bool]:
    """For ``TextEngine.generate``: ends an answer once one of the strings stands in it."""
    strings = [string for string in strings if string]
    if not strings:
        return lambda tokens: False

    def ends(tokens: list[int]) -> bool:
        text = decode(tokens)
        return any(string in text for string in strings)

    return ends


def _add(
    answer: Completion,
    token: int,
    likelihood: float,
    stop_tokens: Sequence[int],
    stop: Callable[[list[int]], bool],
) -> bool:
    """Puts a token to its answer, unless it is one that ends it; whether it was put."""
    if token in stop_tokens:
        answer.ended = "stop"
        return False
    answer.tokens.append(token)
    answer.log_probabilities.append(likelihood)
    if stop(answer.tokens):
        answer.ended = "stop"
    return True
