"""Diversity is all you need (arXiv 1802.06070): the reward is a skill's log probability given the state.

As in URLB (rll-research/url_benchmark: ``agent/diayn.py``), there are 16 skills, and the reward of skill z is
``log q(z | next observation) - log(1 / S)``. A skill lasts an episode, as in the paper; URLB draws one every
50 steps.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.models.layers import apply_mlp, init_mlp
from data_prep.collectors.explorer import Explorer
from data_prep.collectors.intrinsic_reward import Batch


@dataclass(frozen=True)
class DIAYN:
    """See ``intrinsic_reward.IntrinsicReward``; a batch's skill is one-hot.

    Attributes:
      skills: number of skills S.
    """

    skills: int = 16
    hidden: int = 256

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        return init_mlp(key, (observation_dim, self.hidden, self.hidden, self.skills))

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        log_probs = jax.nn.log_softmax(apply_mlp(parameters, batch["next_observation"]))
        log_prob = jnp.sum(log_probs * batch["skill"], -1)
        return -log_prob.mean(), log_prob + math.log(self.skills)


class SkillExplorer:
    """Appends a skill, drawn per episode, one-hot to the observations of ``explorer``; see ``Explorer``."""

    def __init__(self, explorer: Explorer, skills: int):
        self._explorer, self._skills = explorer, skills

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        self._skill = generator.integers(self._skills, size=len(observation))
        self._explorer.begin_round(generator, self._with_skill(observation))

    def act(self, observation: np.ndarray) -> np.ndarray:
        return self._explorer.act(self._with_skill(observation))

    def learn(self) -> None:
        self._explorer.learn()

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        self._explorer.observe(action, reward, self._with_skill(observation))

    def state(self) -> Any:
        return self._explorer.state()

    def restore(self, state: Any) -> None:
        self._explorer.restore(state)

    def labels(self) -> list[dict[str, Any]]:
        labels = self._explorer.labels()
        return [label | {"skill": int(skill)} for label, skill in zip(labels, self._skill, strict=True)]

    def _with_skill(self, observation: np.ndarray) -> np.ndarray:
        return append_skill(observation, self._skill, self._skills)


def append_skill(observation: np.ndarray, skill: np.ndarray | int, skills: int) -> np.ndarray:
    """Appends one skill per observation, or a common one, as a one-hot vector: [N, O] -> [N, O + S]."""
    one_hot = np.eye(skills, dtype=np.float32)[np.broadcast_to(skill, len(observation))]
    return np.concatenate([observation, one_hot], -1)
