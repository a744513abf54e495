"""Layers of the models: weight initialisation, linear maps, normalisation, feedforward."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.mesh import ShardingRules
from agentic_ring.models.blockwise import Weights, apply_blockwise, gather_param, sum_over_axes


def init_weight(
    key: jax.Array, shape: tuple[int, ...], logical_axes: tuple[str | None, ...], fan_in: int
) -> nnx.Param:
    """A float32 parameter with logical axes, drawn from a truncated normal with variance 1 / fan_in."""
    value = jax.nn.initializers.truncated_normal(fan_in**-0.5)(key, shape, jnp.float32)
    return nnx.Param(value, logical_axes=logical_axes)


def embedding_table(key: jax.Array, rows: int, width: int) -> nnx.Param:
    """A float32 table [rows, D], drawn from a normal with standard deviation 0.02."""
    return nnx.Param(0.02 * jax.random.normal(key, (rows, width), jnp.float32), logical_axes=(None, "embed"))


class Linear(nnx.Module):
    """x [..., I] -> [..., O] with a bias."""

    def __init__(self, key: jax.Array, inputs: int, outputs: int, rules: ShardingRules, embed_axis: int):
        axes: list[str | None] = [None, None]
        axes[embed_axis] = "embed"
        self.kernel = init_weight(key, (inputs, outputs), tuple(axes), fan_in=inputs)
        self.bias = nnx.Param(jnp.zeros(outputs), logical_axes=(None,))
        self.rules = rules

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the map, in x's dtype."""
        kernel = gather_param(self.kernel, self.rules, x.dtype)
        return x @ kernel + self.bias[...].astype(x.dtype)


def input_projections(
    keys: Iterator[jax.Array], sizes: Sequence[int], width: int, rules: ShardingRules
) -> list[Linear]:
    """One Linear from each input size to the model width, initialised with the next ``keys``."""
    return [Linear(next(keys), size, width, rules, embed_axis=1) for size in sizes]


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, in float32 or wider (arXiv 1910.07467).

    With ``zero_centered`` the parameter is the scale less 1, and its initial value is 0.
    """

    def __init__(self, width: int, epsilon: float, zero_centered: bool = False):
        initial = jnp.zeros(width) if zero_centered else jnp.ones(width)
        self.scale = nnx.Param(initial, logical_axes=(None,))
        self.epsilon = epsilon
        self.zero_centered = zero_centered

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x, in x's dtype."""
        return self.scaled(x, self.scale[...])

    def scaled(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Normalises x [..., D] with ``scale`` [D] as the value of the parameter, in x's dtype."""
        if self.zero_centered:
            # Not in bfloat16, which would lose the digits of a small difference from 1.
            scale = 1.0 + scale.astype(jnp.promote_types(x.dtype, jnp.float32))
        return rms_norm(x, scale, self.epsilon)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """``RMSNorm`` of x [..., D] with scale [D], in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * inverse * scale).astype(x.dtype)


Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Activation functions of the gate, by name; the second is GELU's approximation by tanh."""


class FeedForward(nnx.Module):
    """Gated feedforward, SwiGLU or GeGLU (arXiv 2002.05202), with pre-norm and residual connection.

    With ``output_norm`` what it adds is normalised too.

    With ``chunk`` set it is the blockwise feedforward of arXiv 2305.19370: a device holds only one chunk
    of the hidden activations [B, chunk, F] at a time, in the backward pass too. ``chunk=None`` takes all
    tokens at once.
    """

    def __init__(
        self,
        key: jax.Array,
        width: int,
        hidden: int,
        chunk: int | None,
        rules: ShardingRules,
        norm_epsilon: float,
        zero_centered_norms: bool = False,
        output_norm: bool = False,
        activation: Activation = "silu",
    ):
        gate, up, down = jax.random.split(key, 3)
        self.norm = RMSNorm(width, norm_epsilon, zero_centered_norms)
        self.gate = init_weight(gate, (width, hidden), ("embed", "ffn"), fan_in=width)
        self.up = init_weight(up, (width, hidden), ("embed", "ffn"), fan_in=width)
        self.down = init_weight(down, (hidden, width), ("ffn", "embed"), fan_in=hidden)
        self.output_norm = RMSNorm(width, norm_epsilon, zero_centered_norms) if output_norm else None
        self.activation: Activation = activation
        self.chunk = chunk
        self.rules = rules

    def __call__(
        self, x: jax.Array, drop: Callable[[jax.Array], jax.Array] = lambda added: added
    ) -> jax.Array:
        """Returns x + drop(feedforward(norm(x))) for x [B, T, D], T sharded over the ring."""
        norm, activate = self.norm, ACTIVATIONS[self.activation]

        def feedforward(weights: Weights, x: jax.Array, _: None, axes: tuple[str, ...]) -> jax.Array:
            scale, gate, up, down = weights
            normed = norm.scaled(x, scale)
            return sum_over_axes((activate(normed @ gate) * (normed @ up)) @ down, axes)

        parameters = (self.norm.scale, self.gate, self.up, self.down)
        added = apply_blockwise(
            feedforward, parameters, x, rules=self.rules, chunk=self.chunk, contracted="ffn"
        )
        if self.output_norm is not None:
            added = self.output_norm(added)
        return x + drop(added)
