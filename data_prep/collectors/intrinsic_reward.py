"""Learners that observe no task reward: TD3 on an intrinsic reward."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentic_ring.training.td3 import TD3Config, TD3State, act, init_population, update
from data_prep.collectors.population import on_own_devices

# Normalised observations are clipped to this many standard deviations (URLB: ``agent/rnd.py``).
_OBSERVATION_CLIP = 5.0

Batch = dict[str, jax.Array]
"""observation [B, O], action [B, A], next_observation [B, O] and skill [B, S] of B transitions."""


class IntrinsicReward(Protocol):
    """An intrinsic reward and the training of its model; hashable, as it is a static argument of a jit."""

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        """Initialises the model's parameters, a pytree; ``observation_dim`` excludes the skill."""
        ...

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The scalar loss of the parameters, and the reward of each transition, [B]."""
        ...


class IntrinsicRewardState(NamedTuple):
    """State of P learners that an update changes; the leading axis is P."""

    td3: TD3State
    parameters: Any
    optimizer: optax.OptState


class IntrinsicRewardLearner:
    """A population of TD3 learners with an intrinsic reward; see ``population.Learner``.

    The model of the reward sees normalised observations; their mean and deviation are those of all
    observations before the round.

    Args:
      seeds: [P].
      skills: number of trailing entries S of an observation that encode the skill.
    """

    def __init__(
        self,
        intrinsic: IntrinsicReward,
        config: TD3Config,
        observation_dim: int,
        action_dim: int,
        seeds: Sequence[int],
        skills: int = 0,
    ):
        self.config, self.horizon, self.discount = config, config.horizon, config.discount
        if config.horizon != 1:
            raise ValueError(
                f"horizon is {config.horizon}; an intrinsic reward is known for one decision only, use 1"
            )
        self._intrinsic, self._members = intrinsic, len(seeds)
        self._seen = observation_dim - skills
        keys = jax.vmap(jax.random.key)(jnp.array(seeds))
        parameters = jax.vmap(lambda key: intrinsic.init(key, self._seen, action_dim))(keys)
        optimizer = jax.vmap(optax.adam(config.learning_rate).init)(parameters)
        td3 = init_population(config, observation_dim, action_dim, jnp.array(seeds))
        self.state = on_own_devices(IntrinsicRewardState(td3, parameters, optimizer), axis=0)

    def batch_shape(self, updates: int) -> tuple[int, ...]:
        delay = self.config.policy_delay
        return (-(-updates // delay), delay, self._members, self.config.batch)

    def begin_round(self, observation: np.ndarray) -> None:
        seen = observation[:, : self._seen]
        self._mean, self._deviation = seen.mean(0), seen.std(0) + 1e-3

    def act(self, state: IntrinsicRewardState, observation: np.ndarray) -> np.ndarray:
        return np.asarray(act(state.td3.actor, observation))

    def update(self, batches: dict[str, np.ndarray]) -> None:
        seen = {
            "observation": self._normalise(batches["observation"]),
            "action": batches["action"],
            "next_observation": self._normalise(batches["next_observation"]),
            "skill": batches["observation"][..., self._seen :],
        }
        seen, batches = on_own_devices((seen, batches), axis=2)
        td3, parameters, optimizer = self.state
        parameters, optimizer, reward = _train(
            self._intrinsic, self.config.learning_rate, parameters, optimizer, seen
        )
        td3 = update(self.config, td3, batches | {"reward": reward})
        self.state = IntrinsicRewardState(td3, parameters, optimizer)

    def _normalise(self, observation: np.ndarray) -> np.ndarray:
        deviations = (observation[..., : self._seen] - self._mean) / self._deviation
        return np.clip(deviations, -_OBSERVATION_CLIP, _OBSERVATION_CLIP)


@partial(jax.jit, static_argnums=(0, 1))
def _train(
    intrinsic: IntrinsicReward,
    learning_rate: float,
    parameters: Any,
    optimizer: optax.OptState,
    batches: Batch,
) -> tuple[Any, optax.OptState, jax.Array]:
    """Trains the reward's model on batches [U, delay, P, B, ...], one step for each of U.

    Returns:
      Parameters, optimizer state, and the rewards [U, delay, P, B] computed before each step.
    """

    def member(parameters: Any, optimizer: optax.OptState, batch: Batch):
        count = batch["action"].shape[:2]
        together = {name: array.reshape(math.prod(count), -1) for name, array in batch.items()}
        gradient, reward = jax.grad(intrinsic.loss_and_reward, has_aux=True)(parameters, together)
        updates, optimizer = optax.adam(learning_rate).update(gradient, optimizer)
        return jax.tree.map(jnp.add, parameters, updates), optimizer, reward.reshape(count)

    def step(carry: tuple[Any, optax.OptState], batch: Batch):
        parameters, optimizer, reward = jax.vmap(member, (0, 0, 1), (0, 0, 1))(*carry, batch)
        return (parameters, optimizer), reward

    (parameters, optimizer), reward = jax.lax.scan(step, (parameters, optimizer), batches)
    return parameters, optimizer, reward
