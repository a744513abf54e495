"""LLaMA (arXiv 2302.13971): token embeddings, the transformer stack and a vocabulary head."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.attention.ring.collectives import RingAxis
from agentic_ring.attention.ring.layout import Layout, from_layout, order, padded_length
from agentic_ring.attention.scores import soft_capped
from agentic_ring.errors import ConfigError, check_at_least_one, check_positive, set_fields
from agentic_ring.mesh import constrain, devices_along
from agentic_ring.models.layers import (
    Weights,
    apply_blockwise,
    gather_param,
    gather_weight,
    init_weight,
    sum_over_axes,
)
from agentic_ring.models.llama.families import family_named, misfits
from agentic_ring.models.transformer import Transformer
from agentic_ring.models.transformer_config import TransformerConfig


@dataclass(frozen=True)
class LlamaConfig:
    """Configuration of the stack, the vocabulary and the loss."""

    transformer: TransformerConfig
    vocab_size: int = 32_000
    tied: bool = False
    """Whether the head is the embedding table (tied embeddings), as in small models."""
    logit_cap: float | None = None
    """Soft cap of the logits; None is none."""
    loss_chunk: int | None = None
    """Tokens per device whose logits are in memory at a time during the loss; None is all of them."""
    context: int | None = None
    """Context that the model was made for, in tokens (``max_position_embeddings``); None if unknown."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    family: str = "llama"
    """Name of the family whose files the model is read from and written to; see ``families``."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "vocab_size", *set_fields(self, "loss_chunk", "context"))
        check_positive(self, *set_fields(self, "logit_cap"))
        for config in (self, self.transformer):
            for name, expected in misfits(family_named(self.family, "family"), config):
                raise ConfigError(
                    f"{name} is {getattr(config, name)}, but models of the family {self.family!r} have "
                    f"{expected}"
                )
        if self.vocab_size < 2:
            raise ConfigError(f"vocab_size is {self.vocab_size}; it must be at least 2")

    def build(self, key: jax.Array) -> "Llama":
        """Returns the model with fresh parameters."""
        return Llama(key, self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """Rows of text with the target at each token."""

    tokens: jax.Array
    """int32 [B, T]."""
    targets: jax.Array
    """int32 [B, T], the next token; shifted before rows are sharded over a ring."""
    weight: jax.Array
    """float32 [B, T], weight of each target in the loss."""
    positions: jax.Array
    """int32 [B, T], or [1, T] for all rows, for rotary embeddings; from 0 in each segment."""
    segment_ids: jax.Array | None
    """int32 [B, T] of the texts that share a row, negative for padding; None if each row is one text."""
    layout: Layout | None = field(metadata={"static": True})
    """Order of the tokens over the ring; None if only ``positions`` define it."""
    hidden_from: jax.Array | None = None
    """int32 [B, T], the first place in the row that no longer sees each token, where ``layout`` is given.
    None if all later tokens of its text see it."""


class Llama(nnx.Module):
    """Predicts each token from the earlier ones."""

    def __init__(self, key: jax.Array, config: LlamaConfig):
        embedding, stack, head = jax.random.split(key, 3)
        width = config.transformer.width
        self.embedding = init_weight(embedding, (config.vocab_size, width), ("vocab", "embed"), fan_in=width)
        self.transformer = Transformer(stack, config.transformer)
        shape = (width, config.vocab_size)
        self.head = None if config.tied else init_weight(head, shape, ("embed", "vocab"), fan_in=width)
        self.config = config

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits float32 [B, T, V] of the token after each of ``tokens``, int32 [B, T], any T.

        The logits are sharded along T over the devices that share a sequence if their number divides T, else
        along V.
        """
        rules, length = self.config.transformer.rules, tokens.shape[1]
        mesh = jax.sharding.get_abstract_mesh()
        ring = devices_along(mesh, rules.sequence)
        padded = padded_length(length, ring, "zigzag")
        place = order("zigzag", padded, ring)
        tokens = jnp.pad(tokens, ((0, 0), (0, padded - length)))[:, place]
        x = self.transformer(self.embedded(tokens), jnp.asarray(place)[None], layout="zigzag")
        if ring == 1:
            return self.logits(x)
        # In order before the head: to index the sharded logits, every device would receive all of them.
        spec = rules.spec("batch", "sequence", None)
        x = jax.shard_map(
            lambda x: from_layout(x, "zigzag", RingAxis.over(rules.sequence)), in_specs=spec, out_specs=spec
        )(x)[:, :length]
        if length % ring == 0:
            return constrain(self.logits(x), rules, "batch", "sequence", "vocab")
        everywhere = replace(rules, vocab=(*rules.vocab, *rules.sequence))
        divides = self.config.vocab_size % devices_along(mesh, everywhere.vocab) == 0
        return constrain(self.logits(x), everywhere if divides else rules, "batch", None, "vocab")

    def logits(self, encoded: jax.Array) -> jax.Array:
        """Logits of the token after each encoded one: [..., D] -> float32 [..., V]."""
        rules = self.config.transformer.rules
        return self._scores(self.transformer.norm(encoded), gather_param(self._head, rules, encoded.dtype))

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Embeds tokens int32 [B, T] as the input of the stack, [B, T, D]."""
        # The lookup keeps the storage dtype, float32 in training, because the gradient of a frequent token
        # is a sum over all its occurrences.
        rules, dtype = self.config.transformer.rules, jnp.dtype(self.config.transformer.dtype)
        # For few tokens the results of a sharded lookup are sent; for many it is cheaper to gather the table.
        vocabulary = "vocab" if tokens.size < self.config.vocab_size else None
        table = gather_weight(self.embedding[...], (vocabulary, "embed"), rules, self.embedding[...].dtype)
        embedded = table[tokens].astype(dtype)
        if not family_named(self.config.family, "family").scaled_embeddings:
            return embedded
        return embedded * jnp.asarray(self.config.transformer.width**0.5, dtype)

    def weighted_cross_entropy(self, batch: TokenBatch) -> jax.Array:
        """Cross entropy of each target in nats times its weight, float32 [B, T].

        It is computed for ``loss_chunk`` tokens at a time, where the tokens without weight, such as those of
        a long question, take no time.
        """
        x = self.embedded(batch.tokens)
        hidden = batch.hidden_from
        if hidden is not None:
            hidden = jnp.stack([hidden, jnp.full_like(hidden, batch.tokens.shape[1])], axis=-1)
        encoded = self.transformer(x, batch.positions, batch.segment_ids, batch.layout, hidden=hidden)
        norm = self.transformer.norm

        def predict(weights: Weights, x: jax.Array, labels: Any, axes: tuple[str, ...]) -> jax.Array:
            (scale, head), (target, weight) = weights, labels
            return weight * _cross_entropy(self._scores(norm.scaled(x, scale), head), target, axes)

        return apply_blockwise(
            predict,
            (norm.scale, self._head),
            encoded,
            (batch.targets, batch.weight),
            rules=self.config.transformer.rules,
            chunk=self.config.loss_chunk,
            contracted="vocab",
            counts=lambda labels: labels[1] != 0,
        )

    @property
    def _head(self) -> nnx.Param:
        return self.embedding if self.head is None else self.head

    def _scores(self, normed: jax.Array, head: jax.Array) -> jax.Array:
        """Logits float32 [..., V] from normalised tokens [..., D] and the weights of ``_head``."""
        scores = (normed @ (head.T if self.head is None else head)).astype(jnp.float32)
        return soft_capped(scores, self.config.logit_cap)


def token_loss(model: Llama, batch: TokenBatch) -> jax.Array:
    """Weighted sum, as in ``training.train_step``, of the cross entropy of each target token, in nats."""
    return jnp.sum(model.weighted_cross_entropy(batch))


def _cross_entropy(logits: jax.Array, target: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Cross entropy [...] of targets int [...] from this device's part of the logits, V over ``axes``."""
    part = logits.shape[-1]
    first = jax.lax.axis_index(axes) * part if axes else 0
    here = (target >= first) & (target < first + part)
    place = jnp.clip(target - first, 0, part - 1)
    of_target = jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]
    largest = jax.lax.stop_gradient(logits.max(axis=-1))
    if axes:
        largest = jax.lax.pmax(largest, axes)
    total = sum_over_axes(jnp.exp(logits - largest[..., None]).sum(axis=-1), axes)
    return largest + jnp.log(total) - sum_over_axes(jnp.where(here, of_target, 0.0), axes)
