"""How a kernel cuts a hop into chunks: equal sizes, padded, heads of a group side by side."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from agentic_ring.attention.mask import HopMask, TokenLabels

MAX_CHUNK = 512
"""Longest default chunk: 512 x 512 float32 scores are 1 MiB a head and stay in a core's cache.
Shorter chunks lose to the loop's overhead, longer ones to memory traffic."""


def default_chunk(length: int) -> int:
    """The chunk size for a block of ``length`` tokens.

    Gives an even number of equal chunks, none longer than ``MAX_CHUNK``: the two halves of a
    zigzag block, one early and one late in the sequence, then never share a chunk, and the half
    of the chunk pairs that is masked can be skipped.
    """
    chunks_of_a_half = -(-length // (2 * MAX_CHUNK))
    return -(-length // (2 * chunks_of_a_half))


@dataclass(frozen=True)
class ChunkGrid:
    """Chunks of queries by chunks of keys.

    Arrays are split into [chunks, B, K, rows, H]. The rows of a chunk are its tokens, for queries
    once for each of the N / K heads that share a key head: grouped queries then cost no copy of
    the keys, and every product is one batched matrix product.

    Attributes:
      query_shape: [B, T, N, H].
      key_shape: [B, S, K, H].
      query_chunk: queries a chunk; where it does not divide T, the last is filled with padding.
      key_chunk: keys a chunk; likewise.
    """

    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    query_chunk: int
    key_chunk: int

    def split_queries(self, x: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [chunks, B, K, N / K * query_chunk, H]."""
        batch, _, heads, head_dim = x.shape
        key_heads = self.key_shape[2]
        x = _pad(x, self.query_chunk).reshape(
            batch, -1, self.query_chunk, key_heads, heads // key_heads, head_dim
        )
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(x.shape[1], batch, key_heads, -1, head_dim)

    def join_queries(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_queries``, padding cut off."""
        batch, length, heads, _ = self.query_shape
        chunks, _, key_heads, _, head_dim = x.shape
        x = x.reshape(chunks, batch, key_heads, heads // key_heads, self.query_chunk, head_dim)
        return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, head_dim)[:, :length]

    def split_rows(self, x: jax.Array) -> jax.Array:
        """One number a query and head: [B, T, N] -> [chunks, B, K, rows]."""
        return self.split_queries(x[..., None])[..., 0]

    def join_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_rows``, padding cut off."""
        return self.join_queries(x[..., None])[..., 0]

    def split_keys(self, x: jax.Array) -> jax.Array:
        """[B, S, K, H] -> [chunks, B, K, key_chunk, H]."""
        batch, _, heads, head_dim = x.shape
        x = _pad(x, self.key_chunk).reshape(batch, -1, self.key_chunk, heads, head_dim)
        return x.transpose(1, 0, 3, 2, 4)

    def join_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_keys``, padding cut off."""
        batch, length, heads, head_dim = self.key_shape
        return x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, head_dim)[:, :length]

    def split_mask(self, mask: HopMask, k: jax.Array) -> tuple[TokenLabels, TokenLabels, jax.Array | None]:
        """Labels of each chunk, and which pairs of chunks have anything to attend to.

        Returns:
          (query labels [query chunks, B, query_chunk], key labels [key chunks, B, key_chunk],
          reachable bool [query chunks, key chunks]); without labels, None for "all of them".
        """
        queries, keys = self.query_shape[1], self.key_shape[1]
        query_padding, key_padding = -queries % self.query_chunk, -keys % self.key_chunk
        if mask.trivial and not key_padding:
            return mask.query, mask.key, None
        if mask.trivial:
            # Tied to the keys, which change from hop to hop: from constants alone, JAX would compute the
            # masks of all pairs ahead of the loop over hops and keep them through it.
            labels = [TokenLabels(jnp.zeros((1, n), jnp.int32)) for n in (queries, keys)]
            mask = HopMask(mask.spec, *jax.lax.optimization_barrier((*labels, k))[:2])
        query = mask.query.pad(query_padding).chunks(self.query_chunk)
        key = mask.key.pad(key_padding).chunks(self.key_chunk)
        query_bounds = jax.tree.map(lambda x: x[:, None], query.bounds())
        return query, key, mask.reachable(query_bounds, key.bounds())


def _pad(x: jax.Array, chunk: int) -> jax.Array:
    """Fills the last chunk of axis 1 with zeros."""
    padding = -x.shape[1] % chunk
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x
