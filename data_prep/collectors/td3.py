"""TD3 as an explorer: a population that maximises the rewards of its tasks while it acts."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from agentic_ring.training.td3 import TD3Config, TD3State, act, init_population, update
from data_prep.collectors.population import on_own_devices


class TD3Learner:
    """A population of TD3 learners; see ``population.Learner``.

    Args:
      seeds: [P].
      reward_columns: [P], index of each member's reward among those of the replay buffer.
    """

    def __init__(
        self,
        config: TD3Config,
        observation_dim: int,
        action_dim: int,
        seeds: Sequence[int],
        reward_columns: Sequence[int],
    ):
        self.config, self.horizon, self.discount = config, config.horizon, config.discount
        self.state = on_own_devices(
            init_population(config, observation_dim, action_dim, jnp.array(seeds)), axis=0
        )
        self._columns = np.array(reward_columns)

    def batch_shape(self, updates: int) -> tuple[int, ...]:
        delay = self.config.policy_delay
        return (-(-updates // delay), delay, len(self._columns), self.config.batch)

    def begin_round(self, observation: np.ndarray) -> None:
        pass

    def act(self, state: TD3State, observation: np.ndarray) -> np.ndarray:
        return np.asarray(act(state.actor, observation))

    def update(self, batches: dict[str, np.ndarray]) -> None:
        own = np.arange(len(self._columns)), slice(None), self._columns
        reward = np.moveaxis(batches["reward"][:, :, *own], 0, 2)
        batches = on_own_devices(batches | {"reward": reward}, axis=2)
        self.state = update(self.config, self.state, batches)
