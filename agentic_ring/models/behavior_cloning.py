"""Behaviour cloning: a multilayer perceptron on the last K observations.

The settings are those of kzl/decision-transformer (``gym/experiment.py --model_type bc``; ``--pct_traj .1``
for BC-10%): K = 20 stacked states, ``layers`` hidden layers with ReLU, tanh, mean squared error of the
current action. Its dropout of 0.1 is left out.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.errors import check_at_least_one
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.layers import Linear
from agentic_ring.models.windows import Windows


@dataclass(frozen=True)
class BehaviorCloningConfig:
    """Sizes of the perceptron.

    Attributes:
      window: number K of observations in the input.
      width: width of each hidden layer.
      layers: number of hidden layers.
    """

    observation_dim: int
    action_dim: int
    window: int = 20
    width: int = 128
    layers: int = 3

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
        self.hidden = jax.vmap(lambda k: Linear(k, config.width, config.width, rules, embed_axis=1))(
            jax.random.split(hidden, config.layers - 1)
        )
        self.last = Linear(last, config.width, config.action_dim, rules, embed_axis=0)

    def __call__(self, windows: Windows) -> jax.Array:
        """Returns actions float32 [B, 1, A] in [-1, 1] of the last decision of each window."""
        stacked = windows.observation.reshape(len(windows.observation), -1)

        def layer(x: jax.Array, linear: Linear) -> tuple[jax.Array, None]:
            return jax.nn.relu(linear(x)), None

        features, _ = jax.lax.scan(layer, jax.nn.relu(self.first(stacked)), self.hidden)
        return jnp.tanh(self.last(features))[:, None]
