"""Scores from products of queries and keys: scale, soft cap, terms of each head; and dropout."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from agentic_ring.attention.mask import HopMask, TokenLabels


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """Probabilities that are set to 0, the others divided by 1 - rate.

    The bits are a hash of the seed, the row of the batch, the head, and the labels (position and
    segment id) of query and key, all counted over the whole arrays. So they are the same however the
    arrays are sharded, permuted or cut, and no array of them is kept. Two tokens of a row with the
    same position and segment id drop the same.

    Attributes:
      seed: uint32 [2].
      first_row, first_head: int32, of this device in the whole batch and among all query heads.
    """

    rate: float = field(metadata={"static": True})
    seed: jax.Array
    first_row: jax.Array
    first_head: jax.Array

    @classmethod
    def from_key(
        cls, rate: float, key: jax.Array | None, first_row: jax.Array, first_head: jax.Array
    ) -> "Dropout | None":
        """Dropout from a key of ``jax.random``; None where there is nothing to drop."""
        if key is None or not rate:
            return None
        return cls(rate, jax.random.bits(key, (2,), jnp.uint32), first_row, first_head)

    def factors(self, pair: HopMask, rows: jax.Array, heads: jax.Array) -> jax.Array:
        """What the probabilities of one chunk pair are multiplied by, 0 or 1 / (1 - rate), [B, G, T, S].

        The labels of the ``pair``, [B, T] and [B, S] (or [1, T] and [1, S]), have positions. Rows [B] and
        query heads [B, G] are counted on this device.
        """
        stream = _mix((self.first_row + rows).astype(jnp.uint32) + self.seed[0])
        stream = _mix(stream[:, None] ^ (self.first_head + heads).astype(jnp.uint32))
        query, key = _label_words(pair.query), _label_words(pair.key)
        query = _mix(query[:, None] ^ stream[..., None])  # [B, G, T]
        key = _mix(_mix(key + self.seed[1])[:, None] ^ stream[..., None])  # [B, G, S]
        # With the query's word once more: in t ^ s only, three corners of a rectangle give the fourth.
        bits = _mix(_mix(query[..., :, None] ^ key[..., None, :]) + query[..., :, None])
        kept = bits >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        return jnp.where(kept, 1 / (1 - self.rate), 0.0)


def alibi_slopes(heads: int) -> jax.Array:
    """The slopes of ALiBi, float32 [heads]: 2 ** (-8 i / heads) for the i-th head from 1 (arXiv 2108.12409).

    Where ``heads`` is no power of two: those of the power below, then every other one of the power above.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [-8 * i / power for i in range(1, power + 1)]
    exponents += [-4 * i / power for i in range(1, 2 * power, 2)]
    return jnp.exp2(jnp.array(exponents[:heads], jnp.float32))


def _label_words(labels: TokenLabels) -> jax.Array:
    """One word [B, T] for a token's labels."""
    # Without segment ids as with one segment, so that padding, which is marked by them, changes nothing.
    segments = jnp.uint32(0) if labels.segment_ids is None else labels.segment_ids.astype(jnp.uint32)
    return _mix(_mix(labels.positions.astype(jnp.uint32)) ^ segments)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every bit depends on every other (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """What a kernel applies before and after the softmax."""

    scale: float = field(metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    """Scaled scores become soft_cap * tanh(score / soft_cap) (arXiv 2408.00118, section 2)."""
    slopes: jax.Array | None = None
    """float [N] of this device's query heads; then slope * distance of the two tokens is taken off (arXiv
    2108.12409)."""
    windows: jax.Array | None = None
    """int32 [N], likewise: a query attends only to keys nearer than the window of its head."""
    dropout: Dropout | None = None

    @property
    def by_position(self) -> bool:
        """Whether the labels of the mask must have positions."""
        return any(part is not None for part in (self.slopes, self.windows, self.dropout))

    def map_heads(self, function: Callable[[jax.Array], jax.Array]) -> "Scores":
        """Applies ``function`` to the arrays [N] of the query heads that are there."""
        return replace(
            self, slopes=jax.tree.map(function, self.slopes), windows=jax.tree.map(function, self.windows)
        )

    def moved(self, rows: jax.Array, heads: jax.Array) -> "Scores":
        """Those of a part of the batch and the heads, which begins that far in."""
        if self.dropout is None:
            return self
        first_row, first_head = self.dropout.first_row + rows, self.dropout.first_head + heads
        return replace(self, dropout=replace(self.dropout, first_row=first_row, first_head=first_head))

    def head_terms(self, pair: HopMask, heads: jax.Array) -> jax.Array | None:
        """What is added to the scores of one chunk pair, [B, G, T, S], or None; see ``Dropout.factors``.

        It is -inf outside the window of the head.
        """
        if self.slopes is None and self.windows is None:
            return None
        query, key = pair.query.positions[:, None, :, None], pair.key.positions[:, None, None, :]
        distance = jnp.abs(query - key)

        def of_head(x: jax.Array) -> jax.Array:
            return x[heads][..., None, None]

        terms = jnp.zeros(()) if self.slopes is None else -of_head(self.slopes) * distance
        return terms if self.windows is None else jnp.where(distance < of_head(self.windows), terms, -jnp.inf)

    def from_products(self, products: jax.Array) -> jax.Array:
        """Scores of products q . k: scaled, and under the soft cap."""
        return soft_capped(products * self.scale, self.soft_cap)

    def gradient(self, d_scores: jax.Array, scores: jax.Array) -> jax.Array:
        """The gradient of the products, given that of the scores and the scores, unmasked."""
        if self.soft_cap is not None:
            d_scores = d_scores * (1 - jnp.square(scores / self.soft_cap))
        return d_scores * self.scale


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns cap * tanh(x / cap), which lies between -cap and cap; x itself where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
