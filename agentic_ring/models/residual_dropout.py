"""Dropout of what residual branches add, with masks that do not depend on how a batch is computed.

Mesh, layout, accumulation and resumption change nothing: the mask of a token is a function of its sequence's
seed, its position, the layer and the branch, never of its place in an array. So it is also the same when the
forward pass is recomputed for the backward pass.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["seed", "position"], meta_fields=["rate"])
@dataclass(frozen=True)
class ResidualDropout:
    """Drops entries of what residual branches add to the tokens of a batch.

    Attributes:
      seed: uint32 [B, T], the same for all tokens of a sequence.
      position: int32 [B, T], the place of each token in its sequence.
      rate: share of the entries that is dropped, in [0, 1).
    """

    seed: jax.Array
    position: jax.Array
    rate: float

    def __call__(self, layer: jax.Array, branch: int, added: jax.Array) -> jax.Array:
        """Sets entries of ``added`` [B, T, D] to 0 with probability ``rate``, divides the others by 1 - rate.

        ``layer``, an int32 scalar, and ``branch``, 0 or 1 within the layer, tell whose output ``added`` is.
        """

        def kept(seed: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), 2 * layer + branch)
            return jax.random.bernoulli(key, 1 - self.rate, added.shape[-1:])

        mask = jax.vmap(jax.vmap(kept))(self.seed, self.position)
        return jnp.where(mask, added / (1 - self.rate), 0).astype(added.dtype)
