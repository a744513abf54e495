"""Intrinsic curiosity module (arXiv 1705.05363): the reward is the prediction error of the next features.

The features are trained by an inverse model, which predicts the action from the features before and after
it, and by a forward model, which predicts the next features. As in URLB (rll-research/url_benchmark:
``agent/icm.py``), both losses have equal weight and the reward is ``log(1 + error)``; the features are those
of its ``agent/icm_apt.py``, with 64 instead of 512 entries, while its ``icm.py`` predicts the observation
itself. Our reward is standardised over the batch: without early termination an offset changes only how much
the critic has to learn, and updates are few here.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.models.layers import apply_mlp, init_mlp
from data_prep.collectors.intrinsic_reward import Batch


@dataclass(frozen=True)
class ICM:
    """See ``intrinsic_reward.IntrinsicReward``.

    Attributes:
      features: width of the learned features.
    """

    hidden: int = 256
    features: int = 64

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        trunk, forward, inverse = jax.random.split(key, 3)
        return {
            "trunk": init_mlp(trunk, (observation_dim + 1, self.features)),
            "forward": init_mlp(forward, (self.features + action_dim, self.hidden, self.features)),
            "inverse": init_mlp(inverse, (2 * self.features, self.hidden, action_dim)),
        }

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        before = encode(parameters, batch["observation"])
        after = encode(parameters, batch["next_observation"])
        predicted = apply_mlp(parameters["forward"], jnp.concatenate([before, batch["action"]], -1))
        predicted_action = jnp.tanh(apply_mlp(parameters["inverse"], jnp.concatenate([before, after], -1)))
        error = jnp.sum((after - predicted) ** 2, -1)
        loss = error.mean() + jnp.sum((batch["action"] - predicted_action) ** 2, -1).mean()
        return loss, jax.nn.standardize(jnp.log1p(jnp.sqrt(error)))


def encode(parameters: Any, observation: jax.Array) -> jax.Array:
    """The features that ICM learns: [..., O] -> [..., F], in (-1, 1)."""
    (layer,) = parameters["trunk"]
    # The constant entry preserves the observation's norm, which standardising would otherwise remove.
    inputs = jnp.concatenate([observation, jnp.ones((*observation.shape[:-1], 1))], -1)
    return jnp.tanh(jax.nn.standardize(inputs @ layer["weight"] + layer["bias"]))
