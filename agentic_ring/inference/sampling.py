"""Sampling of the next token from logits: greedy, or by temperature from the likely tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.errors import ConfigError

_FLOAT32 = np.finfo(np.float32)


class SamplingValues(NamedTuple):
    """``Sampling`` as arrays, so that all settings share one compiled program; scalars, or one a row, [B]."""

    temperature: np.float32 | np.ndarray | jax.Array
    top_p: np.float32 | np.ndarray | jax.Array
    top_k: np.int32 | np.ndarray | jax.Array
    min_p: np.float32 | np.ndarray | jax.Array
    seed: np.uint32 | np.ndarray | jax.Array


@dataclass(frozen=True)
class Sampling:
    """Temperature, the tokens to draw from, and seed.

    A draw depends only on the seed, the index of the prompt and the index of the token within its answer,
    not on the mesh or on the other prompts of the batch.
    """

    temperature: float = 0.0
    """0 always takes the most likely token, and so does any temperature below the normal range of float32."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens with this total probability (arXiv 1904.09751)."""
    top_k: int = 0
    """Draw from so many most likely tokens, from which ``top_p`` then chooses; 0 is all of them."""
    min_p: float = 0.0
    """Draw from tokens with this share of the most likely one's probability (arXiv 2407.01082)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.top_k < 0 or not 0 <= self.min_p <= 1:
            raise ConfigError(
                f"top_k is {self.top_k} and min_p {self.min_p}; top_k must be at least 0, and min_p 0 to 1"
            )
        if not 0 <= self.temperature <= _FLOAT32.max or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"temperature is {self.temperature} and top_p {self.top_p}; temperature must be at least 0 "
                "and finite, and top_p above 0 and at most 1"
            )

    @property
    def values(self) -> SamplingValues:
        """Argument of ``sample_next_token``; only the lowest 32 bits of the seed are used."""
        seed = np.uint32(self.seed % 2**32)
        top_k, min_p = np.int32(min(self.top_k, 2**31 - 1)), np.float32(self.min_p)
        return SamplingValues(np.float32(self.temperature), np.float32(self.top_p), top_k, min_p, seed)

    @staticmethod
    def stacked(rows: Sequence["Sampling"]) -> SamplingValues:
        """The same argument for rows that each have their own."""
        return SamplingValues(*map(np.stack, zip(*(row.values for row in rows), strict=True)))


def sample_next_token(
    logits: jax.Array, sampling: SamplingValues, rows: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Samples the next token of each row from logits float32 [B, V].

    Returns the tokens, int32 [B], and their log probabilities before temperature and top-p, float32 [B].

    Args:
      sampling: one setting for all rows, or one per row.
      rows: int32 [B], index of each row's prompt.
      index: int32 scalar, index of the token within its answer.
    """
    temperature, top_p, top_k, min_p, seed = (jnp.broadcast_to(value, rows.shape) for value in sampling)
    greedy = temperature < _FLOAT32.tiny

    def likeliest() -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(seed: jax.Array, row: jax.Array, kept: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.categorical(jax.random.fold_in(key, row), kept)

    def drawn() -> jax.Array:
        # At most 0, so that a division by a very small number cannot overflow to infinity minus infinity.
        below = logits - logits.max(axis=-1, keepdims=True)
        scaled = below / jnp.where(greedy, 1.0, temperature)[:, None]
        kept = _likely(scaled, top_p[:, None], top_k[:, None], min_p[:, None])
        return jnp.where(greedy, likeliest(), jax.vmap(draw)(seed, rows, kept).astype(jnp.int32))

    tokens = jax.lax.cond(greedy.all(), likeliest, drawn)
    return tokens, jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]


def _likely(logits: jax.Array, top_p: jax.Array, top_k: jax.Array, min_p: jax.Array) -> jax.Array:
    """The logits [B, V], at most 0, with minus infinity for tokens that are not drawn; the others [B, 1]."""
    places = jnp.arange(logits.shape[-1])
    falling = jnp.sort(logits, axis=-1, descending=True)
    falling = jnp.where((places < top_k) | (top_k == 0), falling, -jnp.inf)
    probability = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # No probability precedes the most likely token, so it is always kept. The cumulative probability before
    # the least likely token may round to 1.
    chosen = (falling > -jnp.inf) & ((before < top_p) | (top_p == 1))
    least = jnp.where(chosen, falling, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits < jnp.maximum(least, jnp.log(min_p)), -jnp.inf, logits)
