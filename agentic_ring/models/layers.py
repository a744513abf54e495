"""Layers of the models: weights, linear maps, normalisation, feedforward, residual dropout, perceptrons."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@partial(jax.tree_util.register_dataclass, data_fields=["seed", "position"], meta_fields=["rate"])
@dataclass(frozen=True)
class ResidualDropout:
    """Drops entries of what residual branches add to the tokens of a batch.

    Mesh, layout, accumulation and resumption change nothing: the mask of a token is a function of its
    sequence's seed, its position, the layer and the branch, never of its place in an array. So it is also the
    same when the forward pass is recomputed for the backward pass.

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


MlpParameters = list[dict[str, jax.Array]]
"""A small perceptron as a plain pytree, so that ``jax.vmap`` can build populations of them."""


def init_mlp(key: jax.Array, sizes: tuple[int, ...]) -> MlpParameters:
    """Layers of these widths with orthogonal weights and zero biases (URLB: ``utils.weight_init``)."""
    keys = jax.random.split(key, len(sizes) - 1)
    orthogonal = jax.nn.initializers.orthogonal()
    return [
        {"weight": orthogonal(layer_key, (rows, columns)), "bias": jnp.zeros(columns)}
        for layer_key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def apply_mlp(parameters: MlpParameters, inputs: jax.Array) -> jax.Array:
    """Applies the perceptron: [..., sizes[0]] -> [..., sizes[-1]].

    The first hidden layer has LayerNorm and tanh, which bounds the effect of unscaled observations (as in
    URLB's trunk); the others have LayerNorm and ReLU. LayerNorm in the critic keeps TD3 stable with many
    updates per environment step (arXiv 2302.02948, section 4.2).
    """
    first, *hidden, last = parameters
    features = jnp.tanh(_layer_norm(inputs @ first["weight"] + first["bias"]))
    for layer in hidden:
        features = jax.nn.relu(_layer_norm(features @ layer["weight"] + layer["bias"]))
    return features @ last["weight"] + last["bias"]


def _layer_norm(features: jax.Array) -> jax.Array:
    centred = features - features.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)
