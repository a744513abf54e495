"""Learners of a collection: TD3 on task rewards, and on the intrinsic rewards RND, ICM, APT and DIAYN.

The intrinsic rewards follow URLB (rll-research/url_benchmark: ``agent/``); each class says where it differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentic_ring.models.layers import apply_mlp, init_mlp
from agentic_ring.training.td3 import TD3Config, TD3State, act, init_population, update
from data_prep.explorers import on_own_devices

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
    """A population of TD3 learners with an intrinsic reward; see ``explorers.Learner``.

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


class TD3Learner:
    """A population of TD3 learners; see ``explorers.Learner``.

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


@dataclass(frozen=True)
class RND:
    """Random network distillation (arXiv 1810.12894): the error in predicting random features.

    As in ``rnd.py``, the features are those of the next observation, normalised and clipped.

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


@dataclass(frozen=True)
class ICM:
    """Intrinsic curiosity module (arXiv 1705.05363): the prediction error of the next features.

    The features are trained by an inverse model, which predicts the action from the features before and after
    it, and by a forward model, which predicts the next features. As in ``icm.py``, both losses have equal
    weight and the reward is ``log(1 + error)``; the features are those of ``icm_apt.py``, with 64 instead of
    512 entries, while ``icm.py`` predicts the observation itself. Our reward is standardised over the batch:
    without early termination an offset changes only how much the critic has to learn, and updates are few.

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


@dataclass(frozen=True)
class APT:
    """Active pre-training (arXiv 2103.04551): the distance to the nearest particles.

    The entropy of the visited states is estimated from particles: the distance of each to its k nearest
    neighbours in the batch, in the feature space of ICM. As in ``icm_apt.py``, k is 12, distances are divided
    by their mean, and the reward is the log of one plus their average. The particles are the next
    observations, as with our other explorers; URLB uses the current ones. An update has as many particles as
    transitions. The reward is standardised over the batch as in ``ICM``.

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


@dataclass(frozen=True)
class DIAYN:
    """Diversity is all you need (arXiv 1802.06070): a skill's log probability given the state.

    As in ``diayn.py``, there are 16 skills, and the reward of skill z is ``log q(z | next observation) -
    log(1 / S)``. A skill lasts an episode, as in the paper; URLB draws one every 50 steps. A batch's skill is
    one-hot.

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
