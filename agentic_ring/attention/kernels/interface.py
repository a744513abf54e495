"""The interface of a kernel: attention of one block of queries to one of keys, forward and backward."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from agentic_ring.attention.mask import HopMask
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, state_dtype


class Gradients(NamedTuple):
    """The contribution of one tile to the gradients, in ``state_dtype``, shaped like q, k and v."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


class Tile(NamedTuple):
    """One block of queries against one block of keys.

    Attributes:
      q: queries [B, T, N, H].
      k: keys [B, S, K, H], N a multiple of K.
      v: values [B, S, K, V].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: HopMask
    scores: Scores


class Saved(NamedTuple):
    """What a backward needs of the queries' attention to *all* keys.

    Attributes:
      output: attention over all keys, [B, T, N, V]. With that over this tile's keys only in its place,
        dq and dk come out wrong while the forward and dv stay right.
      logsumexp: over all keys, in ``state_dtype``, [B, T, N].
      d_output: gradient of the loss with respect to ``output``, [B, T, N, V].
      delta: in ``state_dtype``, [B, T, N]; the gradient of a score is its probability times that of the
        probability less this.
      d_logsumexp: gradient with respect to ``logsumexp``, part of ``delta``; None where it is no output.
    """

    output: jax.Array
    logsumexp: jax.Array
    d_output: jax.Array
    delta: jax.Array
    d_logsumexp: jax.Array | None = None

    @classmethod
    def of(
        cls,
        output: jax.Array,
        logsumexp: jax.Array,
        d_output: jax.Array,
        d_logsumexp: jax.Array | None = None,
    ) -> "Saved":
        """With the delta of arXiv 2205.14135, the inner product of output and its gradient."""
        delta = (output.astype(logsumexp.dtype) * d_output.astype(logsumexp.dtype)).sum(-1)
        if d_logsumexp is not None:
            delta -= jnp.where(jnp.isneginf(logsumexp), 0.0, d_logsumexp)
        return cls(output, logsumexp, d_output, delta, d_logsumexp)

    @property
    def total(self) -> jax.Array:
        """The logsumexp, +inf where it is -inf: exp(score - total) is 0 in a row that attends to nothing."""
        return jnp.where(jnp.isneginf(self.logsumexp), jnp.inf, self.logsumexp)


class Kernel(Protocol):
    """Two functions on one tile. They run on local arrays, inside ``jax.shard_map`` or outside it.

    A kernel is a frozen, hashable object. One that cannot serve a case raises NotImplementedError
    naming the case; ``kernel="auto"`` then tries the next.
    """

    def forward(self, tile: Tile) -> SoftmaxState:
        """Attention of the tile's queries to its keys, accumulated in ``state_dtype``.

        A query that attends to nothing gets output 0 and logsumexp -inf.
        """
        ...

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        """The contribution of the tile's keys to the gradients."""
        ...


def accumulate(subscripts: str, *arrays: jax.Array) -> jax.Array:
    """``jnp.einsum`` of arrays of the input dtype, summed and returned in its ``state_dtype``."""
    return jnp.einsum(subscripts, *arrays, preferred_element_type=state_dtype(jnp.result_type(*arrays)))
