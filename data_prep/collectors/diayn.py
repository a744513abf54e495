"""Diversity is all you need (arXiv 1802.06070): the reward is how well a state gives its skill away.

As in URLB (rll-research/url_benchmark: ``agent/diayn.py``): 16 skills, and the reward of skill z is
``log q(z | next observation) - log(1 / S)``. A skill lasts an episode, as in the paper; URLB draws one
every 50 steps.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.models.perceptron import apply_mlp, init_mlp
from data_prep.collectors.curious import Batch


@dataclass(frozen=True)
class DIAYN:
    """See ``curious.Curiosity``; a batch's skill is one-hot.

    Attributes:
      skills: S.
    """

    skills: int = 16
    hidden: int = 256

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        return init_mlp(key, (observation_dim, self.hidden, self.hidden, self.skills))

    def judge(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        guess = jax.nn.log_softmax(apply_mlp(parameters, batch["next_observation"]))
        told = jnp.sum(guess * batch["skill"], -1)
        return -told.mean(), told + math.log(self.skills)
