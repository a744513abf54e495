"""Functional reward encoding (FRE, arXiv 2402.17135): a latent for a reward function, from samples of it.

A transformer without positions reads N pairs of state and reward, and the mean of its outputs gives a normal
distribution of latents. A decoder predicts the reward of any state from the latent, as in kvfrans/fre.
Differences: the transformer is the shared stack (RMSNorm, gated feedforward), the decoder is smaller, and
rewards, told in deviations, are squashed before they are discretised.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.errors import ConfigError, check_at_least_one
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.layers import Linear, embedding_table, gather_param
from agentic_ring.models.transformer import Transformer
from agentic_ring.models.transformer_config import TransformerConfig


@dataclass(frozen=True)
class RewardEncodingConfig:
    """Sizes of encoder and decoder."""

    observation_dim: int
    latent: int = 128
    """Size L of the latent."""
    hidden: int = 256
    """Width of the decoder's two hidden layers."""
    bins: int = 32
    """Number of values that rewards are rounded to before they are embedded."""
    transformer: TransformerConfig = field(
        default_factory=lambda: TransformerConfig(width=64, layers=2, heads=2, ffn_width=128, remat="none")
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "observation_dim", "latent", "hidden")
        if self.bins < 2 or self.transformer.width % 2:
            raise ConfigError(
                f"bins is {self.bins} and the transformer's width {self.transformer.width}; expected at "
                "least 2, and an even width: half of a token is the state's, half the reward's"
            )

    def build(self, key: jax.Array) -> "RewardEncoding":
        """Returns the model with fresh parameters."""
        return RewardEncoding(key, self)


class Latent(NamedTuple):
    """Normal distributions of latents, float32 [K, L] each."""

    mean: jax.Array
    log_variance: jax.Array

    def draw(self, key: jax.Array) -> jax.Array:
        """One latent of each distribution, [K, L]."""
        return self.mean + jnp.exp(self.log_variance / 2) * jax.random.normal(key, self.mean.shape)

    @property
    def divergence(self) -> jax.Array:
        """Mean Kullback-Leibler divergence from the standard normal, in nats per entry of the latent."""
        return (jnp.exp(self.log_variance) + self.mean**2 - 1 - self.log_variance).mean() / 2


class RewardEncoding(nnx.Module):
    """Encodes K reward functions, and decodes their latents."""

    def __init__(self, key: jax.Array, config: RewardEncodingConfig):
        keys, rules, width = iter(jax.random.split(key, 8)), ShardingRules(), config.transformer.width
        states, latent, hidden = config.observation_dim, config.latent, config.hidden
        self.embed_observation = Linear(next(keys), states, width // 2, rules, embed_axis=1)
        self.embed_reward = embedding_table(next(keys), config.bins, width // 2)
        self.transformer = Transformer(next(keys), config.transformer)
        self.mean = Linear(next(keys), width, latent, rules, embed_axis=0)
        self.log_variance = Linear(next(keys), width, latent, rules, embed_axis=0)
        self.decode_first = Linear(next(keys), latent + states, hidden, rules, embed_axis=0)
        self.decode_second = Linear(next(keys), hidden, hidden, rules, embed_axis=0)
        self.decode_reward = Linear(next(keys), hidden, 1, rules, embed_axis=0)
        self.config = config

    def encode(self, observation: jax.Array, reward: jax.Array) -> Latent:
        """Returns latents of pairs whose order does not matter.

        Args:
          observation: float32 [K, N, O], normalised.
          reward: float32 [K, N], in deviations.
        """
        bins = self.config.bins
        bin_of = jnp.clip(jnp.floor((jnp.tanh(reward / 2) + 1) / 2 * bins), 0, bins - 1).astype(jnp.int32)
        table = gather_param(self.embed_reward, self.config.transformer.rules, observation.dtype)
        tokens = jnp.concatenate([self.embed_observation(observation), table[bin_of]], axis=-1)
        # All have the same position: the rotation is none, and each token attends to all.
        encoded = self.transformer(tokens, jnp.zeros((1, tokens.shape[1]), jnp.int32))
        pooled = self.transformer.norm(encoded).mean(axis=1)
        return Latent(self.mean(pooled), self.log_variance(pooled))

    def decode(self, latent: jax.Array, observation: jax.Array) -> jax.Array:
        """Predicts rewards float32 [K, M], in deviations, of states [K, M, O] from latents [K, L]."""
        repeated = jnp.repeat(latent[:, None], observation.shape[1], axis=1)
        features = jax.nn.silu(self.decode_first(jnp.concatenate([repeated, observation], axis=-1)))
        return self.decode_reward(jax.nn.silu(self.decode_second(features)))[..., 0]
