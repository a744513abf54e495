"""Initial weights of the small retriever: random, with two attention patterns built in.

From plain random weights nothing is learned in thousands of updates (docs/notebook.md): the lookup
cannot begin before the words of a key stand beside its number, and they need not stand there before the
lookup uses them. So the start is mimetic, as in arXiv 2305.09828, for this task:

* layer 1 attends to the preceding tokens by its fast rotary waves, whatever the words are;
* layer 2 compares places by what layer 1 wrote there, on its slow waves, and copies what it finds.

Which words matter, and what to copy, remains to be learned.
"""

from collections.abc import Sequence

import jax
import numpy as np

from agentic_ring.models.model import Model, Params
from experiments.retriever.model import RetrieverConfig

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


def starting_params(model: Model[RetrieverConfig], signs: Sequence[int], seed: int) -> Params:
    """Returns the initial parameters.

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
