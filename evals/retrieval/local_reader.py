"""A model on local devices as a reader, which prefills each document once for all its questions."""

import itertools
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from agentic_ring.data.text.chat import ChatTemplate, Turn, chat_template, check_special_tokens
from agentic_ring.data.text.conversation_tokens import prompt_ids
from agentic_ring.data.text.tokenizer import RememberingTokenizer, Tokenizer
from agentic_ring.device_memory import memory_limit
from agentic_ring.errors import ConfigError
from agentic_ring.inference.llama_programs import bucket_size
from agentic_ring.inference.named_model import NamedModel
from agentic_ring.inference.prefix_cache import common_prefix_length
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import make_mesh, shape_with_ring
from agentic_ring.terminal.progress import progress, say
from evals.retrieval.answers import Answer

EMBEDDED = Path(__file__).parents[1] / "retriever"
"""Folder of the small model that comes with the project; ``experiments/train_retriever.py`` trains it."""
CHUNK = 2048
"""Largest number of tokens of a document that are prefilled at a time."""
MEMORY_SHARE = 0.9
"""Share of the host's memory that a model on a CPU may take."""


@dataclass(frozen=True)
class LocalReader:
    """Answers by greedy decoding; the model's config.json says whether it was ``trained_on_task``."""

    name: str
    trained_on_task: bool
    engine: TextEngine
    tokenizer: Tokenizer
    template: ChatTemplate

    def count_tokens(self, document: str, question: str) -> int:
        """Tokens of the prompt with this document and question, including the model's template."""
        return len(self._prompt(document, question))

    def answers(
        self, document: str, questions: Sequence[str], max_new_tokens: int
    ) -> Iterator[tuple[int, Answer]]:
        """Answers with the numbers of their questions, in order.

        These go in batches of equal size that need no more memory than the document: their prompts have at
        most as many tokens as one of its chunks, and those with their answers as many as the document.
        """
        started = time.monotonic()
        first = array("i", self._prompt(document, questions[0]))
        shared, rests = len(first) - 1, []
        for question in questions:
            # The shared prefix comes from whole prompts, as the tokenizer may join the end of a record and
            # the beginning of a question. At least one token of each prompt remains to be decoded. Only what
            # is not shared is kept, as hundreds of whole prompts take gigabytes.
            prompt = self._prompt(document, question)
            same = common_prefix_length([first, prompt[:-1]])
            shared = min(shared, same)
            rests.append((same, prompt[same:]))
        prompts = [[*first[shared:same], *rest] for same, rest in rests]
        with progress("reading", shared) as advance:
            read = self.engine.read(first[:shared], lambda done: advance(done, "tokens")) if shared else None
        reading = time.monotonic() - started
        longest, chunk = max(map(len, prompts)), self.engine.chunk
        rows = max(1, min(chunk // longest, max(shared, chunk) // (longest + max_new_tokens)))
        batches = -(-len(prompts) // rows)
        edges = [number * len(prompts) // batches for number in range(batches + 1)]
        for begin, end in itertools.pairwise(edges):
            started = time.monotonic()
            stops = [self.template.end_ids] * (end - begin)
            completions = self.engine.generate(
                prompts[begin:end], max_new_tokens, document=read, stop_tokens=stops
            )
            each = (time.monotonic() - started) / (end - begin)
            for number, completion in enumerate(completions, begin):
                text, tokens = self.tokenizer.decode(completion.tokens), shared + len(prompts[number])
                yield number, Answer(text, tokens, each, reading_seconds=None if number else reading)

    def _prompt(self, document: str, question: str) -> list[int]:
        return prompt_ids(self.tokenizer, self.template, [Turn("user", document + question)])


def open_reader(
    model: str | None,
    contexts: Sequence[int],
    template: str | None = None,
    allow_extrapolation: bool = False,
    adapter: Path | None = None,
) -> LocalReader:
    """Opens a model; a ``ConfigError`` if it does not support a context, or the memory does not suffice.

    Args:
      model: folder, GGUF file or name; None is the embedded retriever.
      contexts: context lengths to be used; the memory that the longest needs is checked and printed.
      template: name of a chat template; None is the adapter's, else the model's own, or "plain" if it has
        none.
      adapter: folder of a LoRA adapter of the model.
    """
    found, longest = NamedModel.find(model or EMBEDDED, adapter), max(contexts, default=0)
    if longest:
        found.context(longest, allow_extrapolation)
    tokenizer = found.tokenizer(RememberingTokenizer)
    chats = chat_template(template or found.template(tokenizer) or "plain", tokenizer)
    check_special_tokens(chats, tokenizer)
    mesh = make_mesh(shape_with_ring(None, jax.device_count()))
    chunk = bucket_size(min(longest or CHUNK, CHUNK), mesh.size)
    engine = TextEngine(found.load(mesh, context=longest or None), mesh, chunk)
    limit = memory_limit(jax.device_count(), MEMORY_SHARE)
    if longest and limit is not None:
        needed = engine.document_bytes(longest)
        parts = (
            f"reading {longest:,} tokens takes {needed.total / 1e9:.2f} GB: weights "
            f"{needed.weights / 1e9:.2f}, cache {needed.cache / 1e9:.2f}, activations "
            f"{needed.activations / 1e9:.2f}; {limit / 1e9:.2f} GB are available"
        )
        if needed.total > limit:
            raise ConfigError(f"{parts}. Use shorter contexts or more devices")
        say(parts)
    shown = "embedded retriever" if model is None else model.rstrip("/")
    shown += "" if adapter is None else f"+{adapter}"
    trained_on_task = found.fields.get("trained_on_task") is True
    return LocalReader(shown, trained_on_task, engine, tokenizer, chats)
