"""Small multilayer perceptrons as plain pytrees, so that ``jax.vmap`` can build populations of them."""

import jax
import jax.numpy as jnp

Parameters = list[dict[str, jax.Array]]


def init_mlp(key: jax.Array, sizes: tuple[int, ...]) -> Parameters:
    """Layers of these widths with orthogonal weights and zero biases (URLB: ``utils.weight_init``)."""
    keys = jax.random.split(key, len(sizes) - 1)
    orthogonal = jax.nn.initializers.orthogonal()
    return [
        {"weight": orthogonal(layer_key, (rows, columns)), "bias": jnp.zeros(columns)}
        for layer_key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def apply_mlp(parameters: Parameters, inputs: jax.Array) -> jax.Array:
    """Applies the perceptron: [..., sizes[0]] -> [..., sizes[-1]].

    The first hidden layer has LayerNorm and tanh, which bounds the effect of unscaled observations (as in
    URLB's trunk); the others have LayerNorm and ReLU. LayerNorm in the critic keeps TD3 stable with many
    updates per environment step (arXiv 2302.02948, section 4.2).
    """
    first, *hidden, last = parameters
    features = jnp.tanh(_normalize(inputs @ first["weight"] + first["bias"]))
    for layer in hidden:
        features = jax.nn.relu(_normalize(features @ layer["weight"] + layer["bias"]))
    return features @ last["weight"] + last["bias"]


def _normalize(features: jax.Array) -> jax.Array:
    centred = features - features.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)
