"""Baselines: behaviour cloning and the Decision Transformer, on the last few decisions of a trajectory.

Behaviour cloning is a multilayer perceptron on the last K observations. The settings are those of
kzl/decision-transformer (``gym/experiment.py --model_type bc``; ``--pct_traj .1`` for BC-10%): K = 20 stacked
states, ``layers`` hidden layers with ReLU, tanh, mean squared error of the current action. Its dropout of 0.1
is left out.

The Decision Transformer (arXiv 2106.01345) stands on the shared transformer stack:

    R s a  R s a  ...  R s a        K decisions, three tokens each; the action is predicted at its state

The settings are those of kzl/decision-transformer (``gym/experiment.py``): K = 20, 3 layers of one head and
width 128, the embedding of the timestep added to all three tokens. Differences from its GPT-2: RMSNorm,
rotary positions, a gated feedforward of the same number of parameters, no LayerNorm of the embeddings, no
dropout. Windows are sampled by their last decision, so that the beginnings of trajectories, which occur in
every rollout, are part of training.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.errors import check_at_least_one
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.layers import Linear, embedding_table, gather_param
from agentic_ring.models.transformer import Transformer
from agentic_ring.models.transformer_config import TransformerConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """K consecutive decisions of one trajectory per row, the current one last; padding is 0."""

    return_to_go: Any
    """float32 [B, K], scaled."""
    observation: Any
    """float32 [B, K, O], normalised."""
    action: Any
    """float32 [B, K, A] in [-1, 1]; the last one is the target of the prediction, not an input."""
    timestep: Any
    """int32 [B, K] within the trajectory."""
    present: Any
    """bool [B, K]; False for padding before the first decision of the trajectory."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowBatch:
    """Windows, and the loss weight of each decision's action: float32 [B, K], 1 or 0."""

    windows: Windows
    weight: Any


@dataclass(frozen=True)
class BehaviorCloningConfig:
    """Sizes of the perceptron."""

    observation_dim: int
    action_dim: int
    window: int = 20
    """Number K of observations in the input."""
    width: int = 128
    layers: int = 3
    """Number of hidden layers."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "observation_dim", "action_dim", "window", "width", "layers")

    def build(self, key: jax.Array) -> "BehaviorCloning":
        """Returns the model with fresh parameters."""
        return BehaviorCloning(key, self)


class BehaviorCloning(nnx.Module):
    """Predicts the action from observations only."""

    def __init__(self, key: jax.Array, config: BehaviorCloningConfig):
        first, hidden, last = jax.random.split(key, 3)
        rules = ShardingRules()
        self.first = Linear(first, config.window * config.observation_dim, config.width, rules, embed_axis=1)
        keys = jax.random.split(hidden, config.layers - 1)
        self.hidden = jax.vmap(lambda k: Linear(k, config.width, config.width, rules, embed_axis=1))(keys)
        self.last = Linear(last, config.width, config.action_dim, rules, embed_axis=0)

    def __call__(self, windows: Windows) -> jax.Array:
        """Returns actions float32 [B, 1, A] in [-1, 1] of the last decision of each window."""
        stacked = windows.observation.reshape(len(windows.observation), -1)

        def layer(x: jax.Array, linear: Linear) -> tuple[jax.Array, None]:
            return jax.nn.relu(linear(x)), None

        features, _ = jax.lax.scan(layer, jax.nn.relu(self.first(stacked)), self.hidden)
        return jnp.tanh(self.last(features))[:, None]


@dataclass(frozen=True)
class DecisionTransformerConfig:
    """Sizes of the model and its inputs."""

    observation_dim: int
    action_dim: int
    max_timestep: int
    """Number of decisions of the longest trajectory."""
    window: int = 20
    """Number K of decisions in the input."""
    transformer: TransformerConfig = field(
        default_factory=lambda: TransformerConfig(width=128, layers=3, heads=1, ffn_width=344, remat="none")
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "observation_dim", "action_dim", "max_timestep", "window")

    def build(self, key: jax.Array) -> "DecisionTransformer":
        """Returns the model with fresh parameters."""
        return DecisionTransformer(key, self)


class DecisionTransformer(nnx.Module):
    """Predicts the action of each decision from the earlier tokens of its window."""

    def __init__(self, key: jax.Array, config: DecisionTransformerConfig):
        keys = iter(jax.random.split(key, 6))
        width, rules = config.transformer.width, config.transformer.rules
        sizes = 1, config.observation_dim, config.action_dim
        self.embed_return, self.embed_observation, self.embed_action = (
            Linear(next(keys), size, width, rules, embed_axis=1) for size in sizes
        )
        self.embed_timestep = embedding_table(next(keys), config.max_timestep, width)
        self.transformer = Transformer(next(keys), config.transformer)
        self.action_head = Linear(next(keys), width, config.action_dim, rules, embed_axis=0)
        self.config = config

    def __call__(self, windows: Windows) -> jax.Array:
        """Returns actions float32 [B, K, A] in [-1, 1], each predicted at the state token of its decision."""
        config = self.config.transformer
        dtype = jnp.dtype(config.dtype)
        embedded = (
            self.embed_return(windows.return_to_go[..., None].astype(dtype)),
            self.embed_observation(windows.observation.astype(dtype)),
            self.embed_action(windows.action.astype(dtype)),
        )
        place = gather_param(self.embed_timestep, config.rules, dtype)[windows.timestep]
        steps = jnp.stack(embedded, axis=2) + place[:, :, None]
        tokens = steps.reshape(len(steps), -1, config.width)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        present = jnp.repeat(windows.present, len(embedded), axis=1)
        encoded = self.transformer(tokens, positions, jnp.where(present, 0, -1))
        states = encoded.reshape(steps.shape)[:, :, 1]
        return jnp.tanh(self.action_head(self.transformer.norm(states)).astype(jnp.float32))


def window_loss(model: BehaviorCloning | DecisionTransformer, batch: WindowBatch) -> jax.Array:
    """Weighted sum of squared action errors of windows."""
    errors = jnp.square(model(batch.windows) - batch.windows.action)
    return jnp.sum(batch.weight * jnp.mean(errors, axis=-1))
