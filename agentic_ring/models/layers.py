"""Layers of the models, and blockwise computation of what they do to each token (arXiv 2305.19370)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from agentic_ring.attention.ring.collectives import vary_alike
from agentic_ring.mesh import ShardingRules, constrain, shared_axes
from agentic_ring.models.low_rank import LowRankWeight, multiply
from agentic_ring.models.transformer_config import TransformerConfig


def init_weight(
    key: jax.Array, shape: tuple[int, ...], logical_axes: tuple[str | None, ...], fan_in: int
) -> nnx.Param:
    """A float32 parameter with logical axes, drawn from a truncated normal with variance 1 / fan_in."""
    value = jax.nn.initializers.truncated_normal(fan_in**-0.5)(key, shape, jnp.float32)
    return nnx.Param(value, logical_axes=logical_axes)


def embedding_table(key: jax.Array, rows: int, width: int) -> nnx.Param:
    """A float32 table [rows, D], drawn from a normal with standard deviation 0.02."""
    return nnx.Param(0.02 * jax.random.normal(key, (rows, width), jnp.float32), logical_axes=(None, "embed"))


def gather_param(parameter: nnx.Param, rules: ShardingRules, dtype: jnp.dtype) -> Any:
    """Returns the parameter in the compute dtype, gathered over the fsdp and ring axes."""
    return gather_weight(parameter.get_value(), parameter.get_metadata()["logical_axes"], rules, dtype)


def gather_weight(value: Any, axes: tuple[str | None, ...], rules: ShardingRules, dtype: jnp.dtype) -> Any:
    """Returns a weight with these logical axes, gathered along embed and, unless it is a vector, cast.

    The sharding constraint is needed because the partitioner would otherwise gather the activations.
    The cast comes first, which halves the communication in bfloat16. A low-rank weight stays one in float32,
    for ``multiply``; in other dtypes it becomes its sum, so that it is rounded as merged weights are.
    """
    if isinstance(value, LowRankWeight) and dtype == jnp.float32:
        gather, inputs = partial(gather_weight, rules=rules, dtype=dtype), value.a.ndim - 1
        a, b = gather(value.a, (*axes[:inputs], None)), gather(value.b, (None, *axes[inputs:]))
        return replace(value, base=gather(value.base, axes), a=a, b=b)
    value = value[...]
    kept = (None if axis == "embed" else axis for axis in axes)
    return constrain(value.astype(dtype) if value.ndim > 1 else value, rules, *kept)


class Linear(nnx.Module):
    """x [..., I] -> [..., O] with a bias."""

    def __init__(self, key: jax.Array, inputs: int, outputs: int, rules: ShardingRules, embed_axis: int):
        axes = ("embed", None) if embed_axis == 0 else (None, "embed")
        self.kernel = init_weight(key, (inputs, outputs), axes, fan_in=inputs)
        self.bias = nnx.Param(jnp.zeros(outputs), logical_axes=(None,))
        self.rules = rules

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the map, in x's dtype."""
        kernel = gather_param(self.kernel, self.rules, x.dtype)
        return x @ kernel + self.bias[...].astype(x.dtype)


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
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.zero_centered:
            # Not in bfloat16, which would lose the digits of a small difference from 1.
            scale = 1.0 + scale.astype(wide.dtype)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * inverse * scale).astype(x.dtype)


def stack_norm(width: int, config: TransformerConfig) -> RMSNorm:
    """A norm over ``width`` features, as the stack's are."""
    return RMSNorm(width, config.norm_epsilon, config.zero_centered_norms)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class FeedForward(nnx.Module):
    """Gated feedforward, SwiGLU or GeGLU (arXiv 2002.05202), with pre-norm and residual connection.

    With ``output_norm`` of the configuration what it adds is normalised too. With ``ffn_chunk`` it is the
    blockwise feedforward of arXiv 2305.19370: a device holds only one chunk of the hidden activations
    [B, chunk, F] at a time, in the backward pass too.
    """

    def __init__(self, key: jax.Array, config: TransformerConfig):
        gate, up, down = jax.random.split(key, 3)
        width, hidden = config.width, config.ffn_width
        self.norm = stack_norm(width, config)
        self.gate = init_weight(gate, (width, hidden), ("embed", "ffn"), fan_in=width)
        self.up = init_weight(up, (width, hidden), ("embed", "ffn"), fan_in=width)
        self.down = init_weight(down, (hidden, width), ("ffn", "embed"), fan_in=hidden)
        self.output_norm = stack_norm(width, config) if config.output_norm else None
        self.config = config

    def __call__(self, x: jax.Array, drop: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
        """Returns x + drop(feedforward(norm(x))) for x [B, T, D], T sharded over the ring."""
        config, activate = self.config, _ACTIVATIONS[self.config.activation]

        def feedforward(weights: Weights, x: jax.Array, _: None, axes: tuple[str, ...]) -> jax.Array:
            scale, gate, up, down = weights
            normed = self.norm.scaled(x, scale)
            hidden = activate(multiply(normed, gate)) * multiply(normed, up)
            return sum_over_axes(multiply(hidden, down), axes)

        parameters = (self.norm.scale, self.gate, self.up, self.down)
        added = apply_blockwise(
            feedforward, parameters, x, rules=config.rules, chunk=config.ffn_chunk, contracted="ffn"
        )
        return x + drop(added if self.output_norm is None else self.output_norm(added))


@partial(jax.tree_util.register_dataclass, data_fields=["seed", "position"], meta_fields=["rate"])
@dataclass(frozen=True)
class ResidualDropout:
    """Drops entries of what residual branches add to the tokens of a batch.

    The mask of a token is a function of its sequence's seed, its position, the layer and the branch: mesh,
    layout, accumulation, resumption and rematerialisation change nothing.
    """

    seed: jax.Array
    """uint32 [B, T], the same for all tokens of a sequence."""
    position: jax.Array
    """int32 [B, T], the place of each token in its sequence."""
    rate: float
    """Share of the entries that is dropped, in [0, 1)."""

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


def act_on_latent(actor: MlpParameters, latent: jax.Array, observation: jax.Array) -> jax.Array:
    """Deterministic actions [..., A] in [-1, 1] for latents [..., L] and normalised observations [..., O]."""
    return jnp.tanh(apply_mlp(actor, jnp.concatenate([observation, latent], axis=-1)))


def _layer_norm(features: jax.Array) -> jax.Array:
    centred = features - features.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)


Weights = tuple[jax.Array, ...]
TokenFunction = Callable[[Weights, jax.Array, Any, tuple[str, ...]], jax.Array]
ChunkStep = Callable[[Weights, tuple], tuple[Weights, jax.Array]]


def apply_blockwise(
    function: TokenFunction,
    parameters: tuple[nnx.Param, ...],
    x: jax.Array,
    labels: Any = None,
    *,
    rules: ShardingRules,
    chunk: int | None,
    contracted: str,
    counts: Callable[[Any], jax.Array] | None = None,
) -> jax.Array:
    """Computes ``function(weights, x, labels, axes)`` for one chunk of each device's tokens at a time.

    The partitioner would sum the gradient of a weight over all devices after every chunk. Here each device
    sums over its own chunks first, in float32: one all-gather of the weights per pass, and one reduce-scatter
    of the gradients after the backward pass.

    Args:
      function: maps weights, x [b, t, D] and labels [b, t, ...] to an array [b, t, ...], each token
        independently. If a device holds only its part of the ``contracted`` dimension, ``axes`` are the
        mesh axes over which the function must sum (``sum_over_axes``); otherwise ``axes`` is empty.
      parameters: float32, sharded as they are stored. Those of two dimensions or more are passed to the
        function in x's dtype.
      x: [B, T, D], sharded as batch and sequence; so is the result, [B, T, ...].
      labels: an array or a tree of arrays, [B, T, ...], sharded like x; not differentiated.
      chunk: tokens of one sequence per device at a time. None takes all of them and leaves gathers and
        sums to the compiler.
      contracted: logical axis of the weights that stays sharded.
      counts: tells from the labels which tokens count, bool [b, t]; the result of the others is 0. Each
        device takes those that count first, and chunks without any take no time.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else shared_axes(mesh)
    rows, sequence = (tuple(a for a in axes if a in sizes) for axes in (rules.batch, rules.sequence))
    uneven = x.shape[0] % prod(sizes[a] for a in rows) or x.shape[1] % prod(sizes[a] for a in sequence)
    if chunk is None or uneven or x.shape[1] // prod(sizes[a] for a in sequence) <= chunk:
        return function(tuple(gather_param(p, rules, x.dtype) for p in parameters), x, labels, ())
    shards = tuple(parameter[...] for parameter in parameters)
    if mesh.empty:
        return _on_device(function, x.dtype, chunk, counts)(shards, x, labels)
    shardings = (rules.sharding(mesh, p[...].shape, p.get_metadata()["logical_axes"]) for p in parameters)
    stored = tuple(
        PartitionSpec(*(tuple(axis for axis in _axes(entry) if axis in sizes) for entry in sharding.spec))
        for sharding in shardings
    )
    kept = tuple(axis for axis in getattr(rules, contracted) if axis in _used_axes(stored))
    # Devices that sum over an axis would wait for each other in a conditional.
    on_device = _on_device(function, x.dtype, chunk, None if kept else counts, stored, kept)
    tokens = PartitionSpec(rows, sequence)
    in_specs = (stored, tokens, jax.tree.map(lambda _: tokens, labels))
    return jax.shard_map(on_device, in_specs=in_specs, out_specs=tokens)(shards, x, labels)


def sum_over_axes(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the sum over the devices of these mesh axes, or x itself if ``axes`` is empty."""
    return jax.lax.psum(x, axes) if axes else x


def _on_device(
    function: TokenFunction,
    dtype: jnp.dtype,
    chunk: int,
    counts: Callable[[Any], jax.Array] | None,
    stored: tuple[PartitionSpec, ...] = (),
    kept: tuple[str, ...] = (),
) -> Callable[[Weights, jax.Array, Any], jax.Array]:
    """The computation of one device on its shards of the weights, its tokens and their labels.

    ``stored`` is the sharding of each weight, of which the mesh axes ``kept`` stay.
    """
    gathers = [
        (index, dimension, axes)
        for index, spec in enumerate(stored)
        for dimension, entry in enumerate(spec)
        if (axes := tuple(axis for axis in _axes(entry) if axis not in kept))
    ]

    def gather(shards: Weights) -> Weights:
        gathered = [shard.astype(dtype) if shard.ndim > 1 else shard for shard in shards]
        for index, dimension, axes in gathers:
            gathered[index] = jax.lax.all_gather(gathered[index], axes, axis=dimension, tiled=True)
        return tuple(gathered)

    def scatter(sums: Weights) -> Weights:
        """The transpose of ``gather``."""
        parts = list(sums)
        for index, dimension, axes in reversed(gathers):
            parts[index] = jax.lax.psum_scatter(parts[index], axes, scatter_dimension=dimension, tiled=True)
        return tuple(parts)

    def if_any_counts(labels: Any, compute: Callable[[], Any]) -> Any:
        if counts is None:
            return compute()
        zeros = partial(jax.tree.map, lambda leaf: vary_alike(jnp.zeros(leaf.shape, leaf.dtype), like=labels))
        return jax.lax.cond(counts(labels).any(), compute, lambda: zeros(jax.eval_shape(compute)))

    def split(x: jax.Array, padding: int = 0) -> jax.Array:
        """[b, t, ...] -> [chunks, b, chunk, ...], the last chunk filled with ``padding``."""
        widths = [(0, 0), (0, -x.shape[1] % chunk), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, widths, constant_values=padding)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def loop(step: ChunkStep, sums: Weights, rows: tuple) -> tuple[Weights, jax.Array]:
        """Scans ``step`` over chunks of ``rows``: tokens, labels and more, all [b, t, ...].

        Returns sums and outputs [b, t, ...].
        """
        count, length = rows[0].shape[:2]
        if counts is None:
            sums, parts = jax.lax.scan(step, sums, jax.tree.map(split, rows))
            parts = jnp.moveaxis(parts, 0, 1)
            return sums, parts.reshape(count, -1, *parts.shape[3:])[:, :length]

        def at(place: jax.Array) -> tuple:
            """A chunk of ``rows``: their tokens at the positions int [b, chunk], zeros beyond the end."""

            def take(x: jax.Array) -> jax.Array:
                index = jnp.expand_dims(place, range(2, x.ndim))
                return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)

            return jax.tree.map(take, rows)

        def put(carry: tuple[Weights, jax.Array], place: jax.Array) -> tuple[tuple, None]:
            sums, output = carry
            sums, part = step(sums, at(place))
            return (sums, output.at[jnp.arange(count)[:, None], place].set(part, mode="drop")), None

        # Chunk by chunk: a copy of all tokens in this order would take as much memory as a layer's input.
        places = split(jnp.argsort(~counts(rows[1]), axis=1), padding=length)
        part = jax.eval_shape(lambda place: step(sums, at(place))[1], places[0])
        output = vary_alike(jnp.zeros((count, length, *part.shape[2:]), part.dtype), like=rows)
        return jax.lax.scan(put, (sums, output), places)[0]

    @jax.custom_vjp
    def over_chunks(shards: Weights, x: jax.Array, labels: Any) -> jax.Array:
        weights = gather(shards)

        def compute(sums: Weights, chunk: tuple) -> tuple[Weights, jax.Array]:
            x, labels = chunk
            return sums, if_any_counts(labels, lambda: function(weights, x, labels, kept))

        return loop(compute, (), (x, labels))[1]

    def forward(shards: Weights, x: jax.Array, labels: Any) -> tuple[jax.Array, tuple]:
        return over_chunks(shards, x, labels), (shards, x, labels)

    def backward(residuals: tuple, d_output: jax.Array) -> tuple:
        """Recomputes every chunk with its derivative; nothing of a chunk is saved in the forward pass."""
        shards, x, labels = residuals
        weights = gather(shards)

        def differentiate(sums: Weights, chunk: tuple) -> tuple[Weights, jax.Array]:
            x, labels, d_output = chunk

            def derivative() -> tuple[Weights, jax.Array]:
                _, vjp = jax.vjp(lambda weights, x: function(weights, x, labels, kept), weights, x)
                return vjp(d_output)

            d_weights, d_x = if_any_counts(labels, derivative)
            return jax.tree.map(lambda total, d: total + d.astype(jnp.float32), sums, d_weights), d_x

        nothing = jax.tree.map(lambda weight: jnp.zeros_like(weight, jnp.float32), weights)
        nothing = vary_alike(nothing, like=(weights, x, d_output))
        sums, d_x = loop(differentiate, nothing, (x, labels, d_output))
        return scatter(sums), d_x, None

    over_chunks.defvjp(forward, backward)

    def run(shards: Weights, x: jax.Array, labels: Any) -> jax.Array:
        # Outside the custom derivative, so that JAX sums the gradient of a weight that devices share.
        shards = vary_alike(shards, like=(shards, x), axes=_used_axes(stored))
        return over_chunks(shards, x, labels)

    return run


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _used_axes(specs: tuple[PartitionSpec, ...]) -> set[str]:
    return {axis for spec in specs for entry in spec for axis in _axes(entry)}
