"""Weights that are a fixed matrix and a small product of two: LoRA (arXiv 2106.09685)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class LowRankWeight:
    """Stands in a module where a weight would: ``weight[...]`` is base + scale x A B, in float32.

    It is summed up only when a module reads it. Of stacked layers under ``lax.scan`` that is one layer's
    sum at a time, each device its own shard; with the layer rematerialised, none of them is kept.

    Attributes:
      base: [..., inputs, outputs], each of one dimension or more; not trained, of any float dtype.
      a: float32 [..., inputs, R].
      b: float32 [..., R, outputs].
      scale: of the product.
    """

    base: jax.Array
    a: jax.Array
    b: jax.Array
    scale: float

    def __getitem__(self, index: Any) -> jax.Array:
        """The sum, of a weight of one layer; ``index`` is always ``...``, as modules read their weights."""
        if index is not ...:
            raise TypeError(f"a low-rank weight is read whole, by [...], not by [{index!r}]")
        # Exact on every platform, so that merged weights are those that were trained with.
        product = jnp.tensordot(self.a, self.b, axes=1, precision="highest")
        return self.base.astype(jnp.float32) + self.scale * product
