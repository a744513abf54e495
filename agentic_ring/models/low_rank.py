"""Weights with a low-rank update, and products with any weight."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankWeight:
    """Takes the place of a weight in a module: base + scale x A B.

    ``weight[...]`` is the sum, in float32. It is computed when a module reads the weight: for stacked layers
    under ``lax.scan`` that is one layer at a time, each device its own shard; if the layer is rematerialised,
    no sum is kept. ``multiply`` forms no sum.
    """

    base: jax.Array
    """[..., inputs, outputs], each one dimension or more; not trained, any float dtype."""
    a: jax.Array
    """float32 [..., inputs, R]."""
    b: jax.Array
    """float32 [..., R, outputs]."""
    scale: float = field(metadata={"static": True})
    """Factor of the product."""

    def __getitem__(self, index: Any) -> jax.Array:
        """The sum for one layer; ``index`` must be ``...``, the only index that modules use."""
        if index is not ...:
            raise TypeError(f"a low-rank weight is read whole, by [...], not by [{index!r}]")
        # Full precision on every platform, so that merged weights equal those used in training.
        product = jnp.tensordot(self.a, self.b, axes=1, precision="highest")
        return self.base.astype(jnp.float32) + self.scale * product


def multiply(x: jax.Array, weight: "jax.Array | LowRankWeight", inputs: int = 1) -> jax.Array:
    """Returns x [..., *inputs] times a weight [*inputs, *outputs], which has so many dimensions of inputs.

    With a low-rank weight it is x W + scale (x A) B: the derivative forms no matrix of the weight's size,
    which saves a third of the products of a training step.
    """
    if not isinstance(weight, LowRankWeight):
        return jnp.tensordot(x, weight, axes=inputs)
    return jnp.tensordot(x, weight.base, axes=inputs) + weight.scale * _update(x, weight.a, weight.b)


@jax.custom_vjp
def _update(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """(x A) B for A [*inputs, R] and B [R, *outputs]."""
    return jnp.tensordot(jnp.tensordot(x, a, axes=a.ndim - 1), b, axes=1)


def _forward(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple]:
    return _update(x, a, b), (x, a, b)


def _backward(saved: tuple, d_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The derivative; JAX's own one copies ``d_output`` transposed, which takes longer than the products."""
    x, a, b = saved
    tokens = list(range(d_output.ndim - b.ndim + 1))
    outputs = list(range(len(tokens), d_output.ndim))
    d_small = jnp.tensordot(d_output, b, axes=(outputs, list(range(1, b.ndim))))
    small = jnp.tensordot(x, a, axes=a.ndim - 1)
    return (
        jnp.tensordot(d_small, a, axes=([-1], [-1])),
        jnp.tensordot(x, d_small, axes=(tokens, tokens)),
        jnp.tensordot(small, d_output, axes=(tokens, tokens)),
    )


_update.defvjp(_forward, _backward)
