"""The parts of a transformer block: weights, normalisation, rotary positions, feedforward."""

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.mesh import ShardingRules, ambient_axis_size, constrain


def weight(
    key: jax.Array, shape: tuple[int, ...], logical_axes: tuple[str | None, ...], fan_in: int
) -> nnx.Param:
    """A float32 parameter, truncated normal with variance 1 / fan_in, that knows its logical axes."""
    value = jax.nn.initializers.truncated_normal(fan_in**-0.5)(key, shape, jnp.float32)
    return nnx.Param(value, logical_axes=logical_axes)


def gathered(parameter: nnx.Param, rules: ShardingRules, dtype: jnp.dtype) -> jax.Array:
    """The parameter in the compute dtype, whole on every device of the fsdp and ring axes.

    Stated as a constraint because the partitioner, left to itself, gathers the activations instead.
    The cast comes first: half the bytes travel when computing in bfloat16.
    """
    axes = (None if axis == "embed" else axis for axis in parameter.get_metadata()["logical_axes"])
    return constrain(parameter[...].astype(dtype), rules, *axes)


class Linear(nnx.Module):
    """x [..., I] -> [..., O] with a bias."""

    def __init__(self, key: jax.Array, inputs: int, outputs: int, rules: ShardingRules, embed_axis: int):
        axes: list[str | None] = [None, None]
        axes[embed_axis] = "embed"
        self.kernel = weight(key, (inputs, outputs), tuple(axes), fan_in=inputs)
        self.bias = nnx.Param(jnp.zeros(outputs), logical_axes=(None,))
        self.rules = rules

    def __call__(self, x: jax.Array) -> jax.Array:
        """In x's dtype."""
        kernel = gathered(self.kernel, self.rules, x.dtype)
        return x @ kernel + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, in float32 (arXiv 1910.07467)."""

    def __init__(self, width: int, epsilon: float = 1e-5):
        self.scale = nnx.Param(jnp.ones(width), logical_axes=(None,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """In x's dtype."""
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        return (x32 * inverse * self.scale[...]).astype(x.dtype)


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates the two halves of each head by position (arXiv 2104.09864).

    Args:
      x: [B, T, N, H], H even.
      positions: integer [B, T].
      theta: the longest wavelength is 2 pi theta tokens.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class FeedForward(nnx.Module):
    """Gated feedforward, SwiGLU (arXiv 2002.05202), computed over chunks of tokens.

    With ``chunk`` set it is the blockwise feedforward of arXiv 2305.19370: only one chunk of the
    hidden activations [B, chunk, F] is alive on a device, in the backward pass too. ``chunk=None``
    takes all tokens at once.
    """

    def __init__(self, key: jax.Array, width: int, hidden: int, chunk: int | None, rules: ShardingRules):
        gate, up, down = jax.random.split(key, 3)
        self.gate = weight(gate, (width, hidden), ("embed", "ffn"), fan_in=width)
        self.up = weight(up, (width, hidden), ("embed", "ffn"), fan_in=width)
        self.down = weight(down, (hidden, width), ("ffn", "embed"), fan_in=hidden)
        self.chunk = chunk
        self.rules = rules

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applied to each token of x [B, T, D], T sharded over the ring."""
        gate, up, down = (gathered(p, self.rules, x.dtype) for p in (self.gate, self.up, self.down))

        def feedforward(block: jax.Array) -> jax.Array:
            return (jax.nn.silu(block @ gate) * (block @ up)) @ down

        batch, tokens, width = x.shape
        ring = ambient_axis_size("ring")
        block_tokens = tokens // ring
        if self.chunk is None or block_tokens <= self.chunk or tokens % ring:
            return feedforward(x)
        # Chunks are cut inside each device's block, [B, ring, chunks, chunk, D], so that no token
        # changes its device; the last one is padded.
        chunks = -(-block_tokens // self.chunk)
        padding = chunks * self.chunk - block_tokens
        blocks = x.reshape(batch, ring, block_tokens, width)
        blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, padding), (0, 0)))
        blocks = blocks.reshape(batch, ring, chunks, self.chunk, width)
        out = jax.lax.map(jax.checkpoint(feedforward), jnp.moveaxis(blocks, 2, 0))
        out = jnp.moveaxis(out, 0, 2).reshape(batch, ring, chunks * self.chunk, width)
        out = out[:, :, :block_tokens].reshape(batch, tokens, width)
        return constrain(out, self.rules, "batch", "sequence", None)
