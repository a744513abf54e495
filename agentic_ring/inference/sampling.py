"""Choosing the next token from its logits."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.errors import ConfigError


class SamplingValues(NamedTuple):
    """What a program takes of ``Sampling``: scalars, so that one program serves whatever is asked for."""

    temperature: np.float32 | jax.Array
    top_p: np.float32 | jax.Array
    seed: np.uint32 | jax.Array


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    A draw depends on the seed, the row's number among the prompts and the token's number in its answer
    alone: neither on the mesh nor on what else is in the batch.
    """

    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that together have this probability (arXiv 1904.09751)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"temperature is {self.temperature} and top_p {self.top_p}; temperature must be at least 0 "
                "and top_p above 0 and at most 1"
            )

    @property
    def values(self) -> SamplingValues:
        """For ``choose``; of a seed the lowest 32 bits count."""
        seed = np.uint32(self.seed % 2**32)
        return SamplingValues(np.float32(self.temperature), np.float32(self.top_p), seed)


def choose(
    logits: jax.Array, sampling: SamplingValues, rows: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The next token of each row.

    Args:
      logits: float32 [B, V].
      sampling: how.
      rows: int32 [B], each row's number among the prompts.
      index: int32 scalar, the token's number in the answer.

    Returns:
      Tokens int32 [B], and their log probabilities float32 [B] under the model itself.
    """

    def likeliest() -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn() -> jax.Array:
        kept = _nucleus(logits / sampling.temperature, sampling.top_p)
        key = jax.random.fold_in(jax.random.key(sampling.seed), index)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)

    tokens = jax.lax.cond(sampling.temperature == 0, likeliest, drawn)
    likelihood = jax.nn.log_softmax(logits)
    return tokens, jnp.take_along_axis(likelihood, tokens[:, None], axis=-1)[:, 0]


def _nucleus(logits: jax.Array, top_p: np.float32 | jax.Array) -> jax.Array:
    """The logits, minus infinity for what stands outside the likeliest ``top_p``."""
    falling = jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # The likeliest token has nothing before it, so that one is always left.
    least = jnp.where(before < top_p, falling, jnp.inf).min(axis=-1, keepdims=True)
    # The sum of all before the least likely token may round to 1.
    return jnp.where((logits < least) & (top_p < 1), -jnp.inf, logits)
