"""How scores come from products of queries and keys, and which of their probabilities are dropped."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass, data_fields=["seed", "first_row", "first_head"], meta_fields=["rate"]
)
@dataclass(frozen=True)
class Dropout:
    """Probabilities that are set to 0, the others divided by 1 - rate.

    The bits are a hash of the seed, the row of the batch, the head, and the labels (position and
    segment id) of query and key, all counted over the whole arrays. So they are the same however the
    arrays are sharded, permuted or cut, and no array of them is kept.

    Attributes:
      rate: share of the probabilities that is dropped, static.
      seed: uint32 [2].
      first_row: int32 scalar, row of the whole batch that this device's first row is.
      first_head: int32 scalar, likewise for the query heads.
    """

    rate: float
    seed: jax.Array
    first_row: jax.Array
    first_head: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["dropout"], meta_fields=["scale", "soft_cap"])
@dataclass(frozen=True)
class Scores:
    """What a kernel does to the product of a query and a key before and after the softmax.

    Attributes:
      scale: the product is multiplied by it.
      soft_cap: then scores become soft_cap * tanh(score / soft_cap) (arXiv 2408.00118, section 2).
      dropout: of the probabilities; needs positions in the labels of the mask.
    """

    scale: float
    soft_cap: float | None = None
    dropout: Dropout | None = None
