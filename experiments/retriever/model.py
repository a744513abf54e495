"""The small retriever in training: a LLaMA with an auxiliary loss on its first layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from agentic_ring.models.layers import init_weight
from agentic_ring.models.llama import Llama, LlamaConfig
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig
from experiments.retriever.lessons import Lesson, Vocabulary

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


def retriever_config(vocabulary: Vocabulary) -> "RetrieverConfig":
    """The retriever, for this vocabulary."""
    return RetrieverConfig(
        LlamaConfig(_STACK, vocab_size=vocabulary.size, tied=True),
        int(vocabulary.adjectives[0]),
        len(vocabulary.adjectives),
        int(vocabulary.nouns[0]),
        len(vocabulary.nouns),
    )


@dataclass(frozen=True)
class RetrieverConfig:
    """The model and the word tokens of its vocabulary.

    Attributes:
      llama: the model.
      first_adjective, adjectives: first token of the adjectives, which are adjacent, and their number.
      first_noun, nouns: the same of the nouns.
    """

    llama: LlamaConfig
    first_adjective: int
    adjectives: int
    first_noun: int
    nouns: int

    def build(self, key: jax.Array) -> "TaughtRetriever":
        """The model with fresh parameters."""
        return TaughtRetriever(key, self)


class TaughtRetriever(nnx.Module):
    """A LLaMA and two linear maps that read a key's words from its first layer."""

    def __init__(self, key: jax.Array, config: RetrieverConfig):
        llama, adjective, noun = jax.random.split(key, 3)
        self.llama = Llama(llama, config.llama)
        width = config.llama.transformer.width
        self.read_adjective = init_weight(adjective, (width, width), ("embed", None), fan_in=width)
        self.read_noun = init_weight(noun, (width, width), ("embed", None), fan_in=width)
        self.config = config


def retriever_loss(model: TaughtRetriever, lesson: Lesson) -> jax.Array:
    """Weighted sum of the cross entropies of the answers and of the first layer's words, in nats."""
    first, encoded = _encoded(model.llama, lesson)
    answers = _cross_entropy(model.llama.logits(_at(encoded, lesson.answer_places)), lesson.answers)
    config, table = model.config, model.llama.embedding[...]
    words = model.llama.transformer.norm(_at(first, lesson.word_places))
    adjectives = table[config.first_adjective :][: config.adjectives]
    nouns = table[config.first_noun :][: config.nouns]
    told = _cross_entropy(words @ model.read_adjective[...] @ adjectives.T, lesson.adjectives)
    told += _cross_entropy(words @ model.read_noun[...] @ nouns.T, lesson.nouns)
    return jnp.sum(lesson.weight * answers) + FIRST_LAYER_WEIGHT * lesson.weight.sum() * told.mean()


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
    length = lesson.tokens.shape[1]
    far = lesson.positions[:, :, None] - lesson.positions[:, None] > NEARBY
    other = far & (lesson.lines[:, :, None] != lesson.lines[:, None])
    added = jnp.where(other, lesson.crowd[:, None], 0.0)
    return jnp.where(jnp.tri(length, dtype=bool), added, -jnp.inf)[:, None]


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    """Gathers x [B, T, D] at places [B, A]."""
    return jnp.take_along_axis(x, places[..., None], axis=1)


def _cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    found = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - found


def starting_params(model: Model[RetrieverConfig], signs: Sequence[int], seed: int) -> Params:
    """Initial weights: random, with two attention patterns built in.

    From plain random weights nothing is learned in thousands of updates (docs/notebook.md): the lookup
    cannot begin before the words of a key stand beside its number, and they need not stand there before the
    lookup uses them. So the start is mimetic, as in arXiv 2305.09828, for this task:

    * layer 1 attends to the preceding tokens by its fast rotary waves, whatever the words are;
    * layer 2 compares places by what layer 1 wrote there, on its slow waves, and copies what it finds.

    Which words matter, and what to copy, remains to be learned.

    Args:
      model: a model of two layers with one head.
      signs: tokens that are neither words nor digits; layer 2 neither compares nor copies them.
      seed: random seed.
    """
    stack = model.config.llama.transformer
    half = stack.head_dim // 2
    params = model.init_params(jax.random.key(seed))
    params = jax.tree.map(lambda leaf: np.array(leaf), params)
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
    ignored, _ = np.linalg.qr(np.concatenate([embedding[list(signs)], first]).T)
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
