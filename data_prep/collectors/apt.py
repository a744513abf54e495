"""Active pre-training (arXiv 2103.04551): the reward is the distance to the nearest particles.

The entropy of the visited states is estimated from particles: the distance of each to its k nearest
neighbours in the batch, in the feature space of ICM. As in URLB (rll-research/url_benchmark:
``agent/icm_apt.py``), k is 12, distances are divided by their mean, and the reward is the log of one plus
their average. The particles are the next observations, as with our other explorers; URLB uses the current
ones. An update has as many particles as transitions. The reward is standardised over the batch as in
``icm.py``.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from data_prep.collectors.icm import ICM, encode
from data_prep.collectors.intrinsic_reward import Batch


@dataclass(frozen=True)
class APT:
    """See ``intrinsic_reward.IntrinsicReward``.

    Attributes:
      icm: ICM whose features the particles lie in.
      neighbours: k.
    """

    icm: ICM = field(default_factory=ICM)
    neighbours: int = 12

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        return self.icm.init(key, observation_dim, action_dim)

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        loss, _ = self.icm.loss_and_reward(parameters, batch)
        particles = jax.lax.stop_gradient(encode(parameters, batch["next_observation"]))
        return loss, jax.nn.standardize(particle_reward(particles, self.neighbours))


def particle_reward(particles: jax.Array, neighbours: int) -> jax.Array:
    """log(1 + mean distance to the nearest particles, divided by its batch mean), [N, F] -> [N].

    A particle is not its own neighbour; if there are fewer others than ``neighbours``, all of them count.
    """
    squares = jnp.sum(particles**2, -1)
    squared = squares[:, None] + squares - 2 * particles @ particles.T
    others = jnp.where(jnp.eye(len(particles), dtype=bool), jnp.inf, squared)
    nearest = -jax.lax.top_k(-others, min(neighbours, len(particles) - 1))[0]
    distance = jnp.sqrt(jnp.maximum(nearest, 0))
    return jnp.log1p(jnp.mean(distance / (distance.mean() + 1e-8), -1))
