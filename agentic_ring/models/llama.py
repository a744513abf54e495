"""LLaMA (arXiv 2302.13971): the stack between a table of token embeddings and a vocabulary head."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.attention.layout import Layout
from agentic_ring.errors import ConfigError
from agentic_ring.models.blockwise import Weights, over_tokens, sum_over, whole
from agentic_ring.models.layers import rms_norm, weight
from agentic_ring.models.transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class LlamaConfig:
    """The stack and its vocabulary."""

    transformer: TransformerConfig
    vocab_size: int = 32_000
    loss_chunk: int | None = None
    """Tokens a device whose logits are alive at a time while the loss is computed; None is all of them."""

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise ConfigError(f"vocab_size is {self.vocab_size}; it must be at least 2")

    def build(self, key: jax.Array) -> "Llama":
        """The model with fresh parameters."""
        return Llama(key, self)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "targets", "weight", "positions", "segment_ids"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class TokenBatch:
    """Rows of text, and what to predict at each token.

    Attributes:
      tokens: int32 [B, T].
      targets: int32 [B, T], the token after each one: shifted before rows are cut up over a ring.
      weight: float32 [B, T], how much each target counts in the loss.
      positions: int32 [B, T] (or [1, T] where all rows share them), for rotary embeddings; from 0 in each
        segment.
      segment_ids: int32 [B, T] where several texts share a row, negative for padding; None where each
        row is one text.
      layout: the order of the tokens over the ring; None where ``positions`` alone tell it.
    """

    tokens: jax.Array
    targets: jax.Array
    weight: jax.Array
    positions: jax.Array
    segment_ids: jax.Array | None
    layout: Layout | None


class Llama(nnx.Module):
    """Predicts each token from those before it."""

    def __init__(self, key: jax.Array, config: LlamaConfig):
        embedding, stack, head = jax.random.split(key, 3)
        width = config.transformer.width
        self.embedding = weight(embedding, (config.vocab_size, width), ("vocab", "embed"), fan_in=width)
        self.transformer = Transformer(stack, config.transformer)
        self.head = weight(head, (width, config.vocab_size), ("embed", "vocab"), fan_in=width)
        self.config = config

    def cross_entropy(self, batch: TokenBatch) -> jax.Array:
        """Of each token's target, in nats: float32 [B, T]. Logits are alive for ``loss_chunk`` tokens."""
        encoded = self._encode(batch)
        epsilon = self.transformer.norm.epsilon

        def predict(weights: Weights, x: jax.Array, target: jax.Array, axes: tuple[str, ...]) -> jax.Array:
            scale, head = weights
            logits = (rms_norm(x, scale, epsilon) @ head).astype(jnp.float32)
            return _cross_entropy(logits, target, axes)

        return over_tokens(
            predict,
            (self.transformer.norm.scale, self.head),
            encoded,
            batch.targets,
            rules=self.config.transformer.rules,
            chunk=self.config.loss_chunk,
            contracted="vocab",
        )

    def _encode(self, batch: TokenBatch) -> jax.Array:
        # Looked up in float32: the gradient of a frequent token is a sum over all the places it stands.
        rules, dtype = self.config.transformer.rules, jnp.dtype(self.config.transformer.dtype)
        table = whole(self.embedding[...], (None, "embed"), rules, jnp.dtype(jnp.float32))
        x = table[batch.tokens].astype(dtype)
        return self.transformer(x, batch.positions, batch.segment_ids, batch.layout)


def _cross_entropy(logits: jax.Array, target: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[..., V], the part of the vocabulary that this device of ``axes`` holds, and int [...] -> [...]."""
    part = logits.shape[-1]
    first = jax.lax.axis_index(axes) * part if axes else 0
    here = (target >= first) & (target < first + part)
    place = jnp.clip(target - first, 0, part - 1)
    of_target = jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]
    largest = jax.lax.stop_gradient(logits.max(axis=-1))
    if axes:
        largest = jax.lax.pmax(largest, axes)
    total = sum_over(jnp.exp(logits - largest[..., None]).sum(axis=-1), axes)
    return largest + jnp.log(total) - sum_over(jnp.where(here, of_target, 0.0), axes)
