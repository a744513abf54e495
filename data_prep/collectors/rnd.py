"""Random network distillation (arXiv 1810.12894): the reward is the error in predicting random features.

As in URLB (rll-research/url_benchmark: ``agent/rnd.py``), the features are those of the next observation,
normalised and clipped.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.models.layers import apply_mlp, init_mlp
from data_prep.collectors.intrinsic_reward import Batch


@dataclass(frozen=True)
class RND:
    """See ``intrinsic_reward.IntrinsicReward``.

    Attributes:
      features: width of the random features to predict (URLB: 512).
    """

    hidden: int = 256
    features: int = 64

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        sizes = (observation_dim, self.hidden, self.features)
        return {
            "target": init_mlp(jax.random.fold_in(key, 1), sizes),
            "predictor": init_mlp(jax.random.fold_in(key, 2), sizes),
        }

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        wanted = jax.lax.stop_gradient(apply_mlp(parameters["target"], batch["next_observation"]))
        predicted = apply_mlp(parameters["predictor"], batch["next_observation"])
        error = jnp.mean((predicted - wanted) ** 2, -1)
        return error.mean(), error / (error.std() + 1e-8)
