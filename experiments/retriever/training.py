"""The small retriever: a LLaMA with an auxiliary loss on its first layer, its training and its export."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.models.layers import init_weight
from agentic_ring.models.llama import Llama, LlamaConfig, save_pretrained
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from agentic_ring.training.loop import train
from experiments.common.launch import train_stages, training_outputs
from experiments.retriever.lessons import (
    FARTHEST_POSITION,
    Lesson,
    Lessons,
    LessonStage,
    retriever_tokenizer,
    vocabulary,
)

FIRST_LAYER_WEIGHT = 0.5
"""Weight of the first layer's loss relative to that of the answers."""
NEARBY = 64
"""Distance in tokens up to which a token stands for no others."""

_CONSTANT = 0.3
"""First dimension of every token's embedding; the other dimensions are 0.07 on average."""
_EMBEDDING_SCALE = 6.0
"""Factor on the scale of ``weight``: tokens must not drown in what layer 1 adds."""
_FAST_WAVES = 6
_DISTANCE = 2.3
"""Distance in tokens at which layer 1 attends most: a key's words stand 1 to 4 before their use."""
_STRENGTH = 0.8
"""Contribution of each fast wave to a score."""
_OTHER_QUERIES = 0.1
_COPIED = 2.0
"""Factor on the scale of layer 1's output."""
_SLOW_FROM = 0.45
"""Share of the waves, from the fastest on, that layer 2 does not use."""
_LOGITS = 0.125
"""Scale of the last norm: with embeddings this large the first logits would be far too sharp."""

_STACK = TransformerConfig(
    width=192,
    layers=2,
    heads=1,
    # One wide head: among 100,000 keys the right one must stand out on rotary waves that hardly turn.
    head_size=128,
    ffn_width=256,
    # With this base more than half of the waves hardly turn over half a million positions.
    rope_theta=1e16,
    remat="none",
)


def retriever_llama() -> LlamaConfig:
    """The retriever as a LLaMA."""
    return LlamaConfig(_STACK, vocab_size=len(vocabulary().words), tied=True)


class TaughtRetriever(nnx.Module):
    """A LLaMA and two linear maps that read a key's words from its first layer."""

    def __init__(self, key: jax.Array):
        llama, adjective, noun = jax.random.split(key, 3)
        self.llama = Llama(llama, retriever_llama())
        width = _STACK.width
        self.read_adjective = init_weight(adjective, (width, width), ("embed", None), fan_in=width)
        self.read_noun = init_weight(noun, (width, width), ("embed", None), fan_in=width)


class RetrieverConfig:
    """The retriever in training, as ``Model`` takes it."""

    def build(self, key: jax.Array) -> TaughtRetriever:
        """The model with fresh parameters."""
        return TaughtRetriever(key)


def retriever_loss(model: TaughtRetriever, lesson: Lesson) -> jax.Array:
    """Weighted sum of the cross entropies of the answers and of the first layer's words, in nats."""
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    first, encoded = _encoded(model.llama, lesson)
    answers = cross_entropy(model.llama.logits(_at(encoded, lesson.answer_places)), lesson.answers)
    known, table = vocabulary(), model.llama.embedding[...]
    words = model.llama.transformer.norm(_at(first, lesson.word_places))
    told = sum(
        cross_entropy(words @ read[...] @ table[ids.start : ids.stop].T, targets)
        for read, ids, targets in (
            (model.read_adjective, known.adjectives, lesson.adjectives),
            (model.read_noun, known.nouns, lesson.nouns),
        )
    )
    return jnp.sum(lesson.weight * answers) + FIRST_LAYER_WEIGHT * lesson.weight.sum() * jnp.mean(told)


def answer_logits(model: TaughtRetriever, lesson: Lesson) -> jax.Array:
    """Logits of the answers' tokens, float32 [B, A, V]."""
    _, encoded = _encoded(model.llama, lesson)
    return model.llama.logits(_at(encoded, lesson.answer_places))


def _encoded(llama: Llama, lesson: Lesson) -> tuple[jax.Array, jax.Array]:
    """Activations [B, T, D] after the first and after the last layer."""
    stack, crowd = llama.transformer, _crowd(lesson)
    x, layers = llama.embedded(lesson.tokens), []
    for index in range(stack.config.layers):
        block = stack.block(index)
        query, key, value = block.attention.project(x, lesson.positions)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
        heads = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores + crowd), value)
        x = block.feedforward(x + block.attention.combine(heads))
        layers.append(x)
    return layers[0], layers[-1]


def _crowd(lesson: Lesson) -> jax.Array:
    """What is added to the scores [B, 1, T, T] of a row, so that they compete as those of a full record.

    A token that stands for n tokens has n times its weight in the softmax: the log of n is added to its
    score, except for tokens of the same line and those nearby, which are the only ones of their kind.
    """
    far = lesson.positions[:, :, None] - lesson.positions[:, None] > NEARBY
    other = far & (lesson.lines[:, :, None] != lesson.lines[:, None])
    added = jnp.where(other, lesson.crowd[:, None], 0.0)
    return jnp.where(jnp.tri(lesson.tokens.shape[1], dtype=bool), added, -jnp.inf)[:, None]


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    """Gathers x [B, T, D] at places [B, A]."""
    return jnp.take_along_axis(x, places[..., None], axis=1)


def starting_params(seed: int) -> Params:
    """Initial weights: random, with two attention patterns built in.

    From plain random weights nothing is learned in thousands of updates (docs/notebook.md): the lookup
    cannot begin before the words of a key stand beside its number, and they need not stand there before the
    lookup uses them. So the start is mimetic, as in arXiv 2305.09828, for this task:

    * layer 1 attends to the preceding tokens by its fast rotary waves, whatever the words are;
    * layer 2 compares places by what layer 1 wrote there, on its slow waves, and copies what it finds, except
      for tokens that are neither words nor digits.

    Which words matter, and what to copy, remains to be learned.
    """
    stack, half = _STACK, _STACK.head_dim // 2
    params = jax.tree.map(np.array, Model(RetrieverConfig()).init_params(jax.random.key(seed)))
    llama = params["llama"]
    attention = llama["transformer"]["blocks"]["attention"]
    embedding, query, key = llama["embedding"], attention["query"][:, :, 0], attention["key"][:, :, 0]
    value, output = attention["value"][:, :, 0], attention["output"][:, 0]

    embedding[:, 0] = _CONSTANT
    # The first dimension of a token after the norm.
    constant = _CONSTANT / np.sqrt(np.square(embedding).mean(axis=1)).mean()
    strength = np.sqrt(_STRENGTH * np.sqrt(stack.head_dim)) / constant
    angles = _DISTANCE * stack.rope_theta ** (-np.arange(_FAST_WAVES) / half)
    for weights in (query, key):
        weights[0] *= _OTHER_QUERIES
        weights[0, 0] = 0.0
    key[0, 0, :_FAST_WAVES] = strength
    query[0, 0, :_FAST_WAVES] = strength * np.cos(angles)
    query[0, 0, half : half + _FAST_WAVES] = -strength * np.sin(angles)
    output[0] *= _COPIED

    first = np.zeros((1, stack.width))
    first[0, 0] = 1.0
    ignored, _ = np.linalg.qr(np.concatenate([embedding[list(vocabulary().signs)], first]).T)
    compare = query[1] - ignored @ (ignored.T @ query[1])
    fast = int(_SLOW_FROM * half)
    compare[:, [*range(fast), *range(half, half + fast)]] = 0.0
    query[1] = key[1] = compare
    copy, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((stack.width, stack.head_dim)))
    value[1] = copy - ignored @ (ignored.T @ copy)
    output[1] = copy.T

    llama["embedding"] = embedding * np.float32(_EMBEDDING_SCALE)
    llama["transformer"]["norm"]["scale"] *= np.float32(_LOGITS)
    return params


STAGES = (
    LessonStage(tokens=256, rows=4, questions=16, steps=1500, learning_rate=2e-3, crowding=0.0),
    LessonStage(tokens=512, rows=2, questions=32, steps=1800, learning_rate=2e-3, crowding=4.0),
)


@dataclass(frozen=True)
class RetrieverRun:
    """Everything that decides a run's result."""

    stages: tuple[LessonStage, ...]
    seed: int


def train_retriever(run: RetrieverRun, mesh: Mesh, directory: Path) -> Params:
    """Trains all stages, each from the weights of the previous one; returns the final weights."""
    model = Model(RetrieverConfig())

    def train_stage(number: int, folder: Path, params: Params | None) -> Params:
        stage = run.stages[number]
        say(f"stage {number + 1} of {len(run.stages)}: rows of {short_tokens(stage.tokens)} tokens")
        start = partial(starting_params, run.seed) if params is None else lambda: params
        with training_outputs(folder, run) as outputs:
            lessons, training = Lessons(stage, run.seed), stage.training(run.seed)
            return train(training, model, retriever_loss, lessons, mesh, *outputs, start=start).params

    return train_stages(directory, len(run.stages), train_stage)


def export(params: Params, folder: Path) -> None:
    """Writes the LLaMA without the parts for training, in half precision, with its tokenizer."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    retriever: TaughtRetriever = Model(RetrieverConfig()).bind(half)
    write_others = partial(write_beside_weights, retriever_tokenizer(), {"trained_on_task": True})
    save_pretrained(retriever.llama, folder, FARTHEST_POSITION, write_others)


def write_beside_weights(tokenizer: Tokenizer, fields: dict[str, Any], folder: Path) -> None:
    """Adds the tokenizer to a model's folder, and fields to its config that change nothing of the model."""
    tokenizer.save(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(fields | json.loads(path.read_text()), indent=2) + "\n")
