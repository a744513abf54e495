"""Chunks of queries and keys that a kernel works on: equal sizes, padded, heads of a group side by side."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from agentic_ring.attention.mask import HopMask, TokenLabels

MAX_CHUNK = 512
"""Longest default chunk: 512 x 512 float32 scores are 1 MiB and stay in a core's cache. Shorter chunks
lose to the loop's overhead, longer ones to memory traffic."""


def default_chunk(length: int, longest: int = MAX_CHUNK, halves: bool = True) -> int:
    """The chunk size for a run of ``length`` tokens: equal chunks, none longer than ``longest``.

    With ``halves`` their number is even: the two halves of a zigzag block, one early and one late in
    the sequence, then never share a chunk, and the half of the chunk pairs that is masked can be
    skipped. So can a quarter of the pairs on a causal diagonal.
    """
    parts = 2 if halves else 1
    return -(-length // (parts * -(-length // (parts * longest))))


@dataclass(frozen=True)
class ChunkGrid:
    """Chunks of queries by chunks of keys, of all rows and heads at once.

    A *stream* is one key head of one row of the batch with the N / K query heads that share it. Arrays
    are split into [chunks, streams, rows, H]. The rows of a chunk are its tokens, for queries once for
    each head of the group: grouped queries then cost no copy of the keys, and every product is one
    batched matrix product.

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

    @property
    def group(self) -> int:
        """N / K, query heads of a stream."""
        return self.query_shape[2] // self.key_shape[2]

    def split_queries(self, x: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [chunks, streams, N / K * query_chunk, H]."""
        batch, key_heads = self.key_shape[0], self.key_shape[2]
        x = _pad(x, self.query_chunk).reshape(batch, -1, self.query_chunk, key_heads, self.group, x.shape[3])
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(
            -1, batch * key_heads, self.group * self.query_chunk, x.shape[5]
        )

    def join_queries(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_queries``, padding cut off."""
        batch, length, heads, head_dim = self.query_shape[:3] + x.shape[-1:]
        x = x.reshape(-1, batch, self.key_shape[2], self.group, self.query_chunk, head_dim)
        return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, head_dim)[:, :length]

    def split_rows(self, x: jax.Array) -> jax.Array:
        """One number a query and head: [B, T, N] -> [chunks, streams, rows]."""
        return self.split_queries(x[..., None])[..., 0]

    def join_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_rows``, padding cut off."""
        return self.join_queries(x[..., None])[..., 0]

    def split_keys(self, x: jax.Array) -> jax.Array:
        """[B, S, K, H] -> [chunks, streams, key_chunk, H]."""
        batch, _, heads, head_dim = x.shape
        x = _pad(x, self.key_chunk).reshape(batch, -1, self.key_chunk, heads, head_dim)
        return x.transpose(1, 0, 3, 2, 4).reshape(-1, batch * heads, self.key_chunk, head_dim)

    def join_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_keys``, padding cut off."""
        batch, length, heads, _ = self.key_shape
        x = x.reshape(-1, batch, heads, self.key_chunk, x.shape[-1]).transpose(1, 0, 3, 2, 4)
        return x.reshape(batch, -1, heads, x.shape[-1])[:, :length]

    def split_mask(
        self, mask: HopMask, k: jax.Array, windows: jax.Array | None = None
    ) -> tuple[HopMask, jax.Array | None]:
        """The labels of each chunk, and which pairs of chunks have anything to attend to.

        Args:
          mask: the mask of the tile.
          k: its keys.
          windows: int32 [N], windows of the query heads, or None.

        Returns:
          (the mask with labels [chunks, streams or 1, tokens], reachable bool [query chunks, key chunks]);
          without labels, None for "all of them".
        """
        queries, keys = self.query_shape[1], self.key_shape[1]
        query_padding, key_padding = -queries % self.query_chunk, -keys % self.key_chunk
        if mask.trivial and not key_padding:
            return mask, None
        if mask.trivial:
            query, key = (TokenLabels(segment_ids=jnp.zeros((1, n), jnp.int32)) for n in (queries, keys))
            mask = HopMask(mask.spec, query, key)
        # Tied to the keys, which change from hop to hop: from constants alone, JAX would compute the
        # masks of all pairs ahead of the loop over hops and keep them through it.
        mask, _ = jax.lax.optimization_barrier((mask.placed(queries, keys), k))
        query = mask.query.pad(query_padding).map(lambda x: self._split_labels(x, self.query_chunk))
        key = mask.key.pad(key_padding).map(lambda x: self._split_labels(x, self.key_chunk))
        query_bounds = jax.tree.map(lambda x: x[:, None], query.bounds())
        key_bounds = key.bounds()
        reachable = mask.reachable(query_bounds, key_bounds)
        if windows is not None:
            widest = jnp.tile(windows.reshape(-1, self.group).max(1), self.key_shape[0])
            reachable &= mask.nearer(widest, query_bounds, key_bounds)
        return replace(mask, query=query, key=key), reachable.any(-1)

    def stream_heads(self) -> tuple[jax.Array, jax.Array]:
        """The row of the batch [streams] and the query heads [streams, N / K] of each stream."""
        batch, heads = self.query_shape[0], jnp.arange(self.query_shape[2]).reshape(-1, self.group)
        return jnp.repeat(jnp.arange(batch), len(heads)), jnp.tile(heads, (batch, 1))

    def _split_labels(self, x: jax.Array, chunk: int) -> jax.Array:
        """[B, T] -> [chunks, streams, chunk]; what the batch shares, [1, T], all streams share."""
        x = x.reshape(len(x), -1, chunk).swapaxes(0, 1)
        return x if x.shape[1] == 1 else jnp.repeat(x, self.key_shape[2], axis=1)


def _pad(x: jax.Array, chunk: int) -> jax.Array:
    """Fills the last chunk of axis 1 with zeros."""
    padding = -x.shape[1] % chunk
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x
