"""Learners of a collection: TD3 on task rewards, and on the intrinsic rewards RND, ICM, APT and DIAYN.

The intrinsic rewards follow URLB (rll-research/url_benchmark: ``agent/``); each class says where it differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.models.layers import apply_mlp, init_mlp
from agentic_ring.training.td3 import TD3Config, TD3State, act, init_population, update

# Normalised observations are clipped to this many standard deviations (URLB: ``agent/rnd.py``).
_OBSERVATION_CLIP = 5.0
# More devices would spend more time on starting updates than they save.
_MOST_DEVICES = 4

Batch = dict[str, jax.Array]
"""observation [B, O], action [B, A], next_observation [B, O] and one-hot skill [B, S] of B transitions."""


class TD3Learner:
    """A population of P TD3 learners; its arrays have a leading axis P.

    Args:
      seeds: [P].
      reward_columns: [P], index of each member's reward among those of the replay buffer.
    """

    state: Any
    """Everything that an update changes, a pytree."""

    def __init__(
        self,
        config: TD3Config,
        observation_dim: int,
        action_dim: int,
        seeds: Sequence[int],
        reward_columns: Sequence[int] = (),
    ):
        self.config, self._members, self._columns = config, len(seeds), np.array(reward_columns)
        td3 = init_population(config, observation_dim, action_dim, jnp.array(seeds))
        self.state = on_own_devices(td3, axis=0)

    def batch_shape(self, updates: int) -> tuple[int, ...]:
        """The leading shape of the batches that ``update`` takes for this many critic updates."""
        delay = self.config.policy_delay
        return (-(-updates // delay), delay, self._members, self.config.batch)

    def begin_round(self, observation: np.ndarray) -> None:
        """Called at the start of a round with all observations collected before it, [N, O]."""

    def act(self, state: Any, observation: np.ndarray) -> np.ndarray:
        """Returns actions [P, M, A] without noise of the policies in ``state`` for observations [P, M, O]."""
        return np.asarray(act(state.actor, observation))

    def update(self, batches: dict[str, np.ndarray]) -> None:
        """Updates on batches [*batch_shape, ...]; need not wait for the result."""
        own = np.arange(self._members), slice(None), self._columns
        reward = np.moveaxis(batches["reward"][:, :, *own], 0, 2)
        self.state = update(self.config, self.state, on_own_devices(batches | {"reward": reward}, axis=2))

    def restore(self, state: Any) -> None:
        """Continues with what ``state`` was, read from a file."""
        self.state = on_own_devices(state, axis=0)


class JoinedLearners:
    """Populations with networks of different widths as one: its members are those of one after the other's.

    It has the methods of ``TD3Learner``, and their settings are alike but for the widths.
    """

    def __init__(self, *populations: TD3Learner):
        self.config, self._populations = populations[0].config, populations
        members = [population.batch_shape(1)[2] for population in populations]
        self._members, self._edges = sum(members), np.cumsum(members)[:-1]

    @property
    def state(self) -> Any:
        """Everything that an update changes."""
        return [population.state for population in self._populations]

    def batch_shape(self, updates: int) -> tuple[int, ...]:
        first, delay, _, batch = self._populations[0].batch_shape(updates)
        return (first, delay, self._members, batch)

    def begin_round(self, observation: np.ndarray) -> None: ...

    def act(self, state: Any, observation: np.ndarray) -> np.ndarray:
        parts = zip(self._populations, state, np.split(observation, self._edges), strict=True)
        return np.concatenate([population.act(own, seen) for population, own, seen in parts])

    def update(self, batches: dict[str, np.ndarray]) -> None:
        parts = {name: np.split(values, self._edges, axis=2) for name, values in batches.items()}
        for index, population in enumerate(self._populations):
            population.update({name: each[index] for name, each in parts.items()})

    def restore(self, state: Any) -> None:
        for population, own in zip(self._populations, state, strict=True):
            population.restore(own)


def on_own_devices(tree: Any, axis: int) -> Any:
    """Spreads the members of a population, which are along ``axis`` of every array, over the local devices.

    Members are independent, so that each device updates its own without communication. Simulated CPU devices
    thereby use several cores, which products as small as a learner's do not on one device.
    """
    devices = jax.local_devices()[:_MOST_DEVICES]
    members = jax.tree.leaves(tree)[0].shape[axis]
    count = max(n for n in range(1, len(devices) + 1) if members % n == 0)
    mesh = Mesh(np.array(devices[:count]), ("member",))
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*[None] * axis, "member")))


class IntrinsicRewardState(NamedTuple):
    """The state of P learners; the leading axis is P."""

    td3: TD3State
    parameters: Any
    optimizer: optax.OptState


class IntrinsicRewardLearner(TD3Learner):
    """A population of TD3 learners with an intrinsic reward.

    The model of the reward sees normalised observations; their mean and deviation are those of all
    observations before the round. The reward is known for one decision only: the horizon must be 1.

    Args:
      skills: number of trailing entries S of an observation that encode the skill.
    """

    def __init__(
        self,
        intrinsic: "IntrinsicReward",
        config: TD3Config,
        observation_dim: int,
        action_dim: int,
        seeds: Sequence[int],
        skills: int = 0,
    ):
        super().__init__(config, observation_dim, action_dim, seeds)
        self._intrinsic, self._seen = intrinsic, observation_dim - skills
        keys = jax.vmap(jax.random.key)(jnp.array(seeds))
        parameters = jax.vmap(lambda key: intrinsic.init(key, self._seen, action_dim))(keys)
        optimizer = jax.vmap(optax.adam(config.learning_rate).init)(parameters)
        self.state = IntrinsicRewardState(self.state, *on_own_devices((parameters, optimizer), axis=0))

    def begin_round(self, observation: np.ndarray) -> None:
        seen = observation[:, : self._seen]
        self._mean, self._deviation = seen.mean(0), seen.std(0) + 1e-3

    def act(self, state: IntrinsicRewardState, observation: np.ndarray) -> np.ndarray:
        return super().act(state.td3, observation)

    def update(self, batches: dict[str, np.ndarray]) -> None:
        seen = {
            "observation": self._normalise(batches["observation"]),
            "action": batches["action"],
            "next_observation": self._normalise(batches["next_observation"]),
            "skill": batches["observation"][..., self._seen :],
        }
        seen, batches = on_own_devices((seen, batches), axis=2)
        td3, *model = self.state
        *model, reward = _train(self._intrinsic, self.config.learning_rate, *model, seen)
        self.state = IntrinsicRewardState(update(self.config, td3, batches | {"reward": reward}), *model)

    def _normalise(self, observation: np.ndarray) -> np.ndarray:
        deviations = (observation[..., : self._seen] - self._mean) / self._deviation
        return np.clip(deviations, -_OBSERVATION_CLIP, _OBSERVATION_CLIP)


@partial(jax.jit, static_argnums=(0, 1))
def _train(
    intrinsic: "IntrinsicReward", learning_rate: float, parameters: Any, optimizer: Any, batches: Batch
) -> tuple[Any, Any, jax.Array]:
    """Trains the reward's model on batches [U, delay, P, B, ...], one step for each of U.

    Returns:
      Parameters, optimizer state, and the rewards [U, delay, P, B] computed before each step.
    """

    def member(parameters: Any, optimizer: Any, batch: Batch):
        count = batch["action"].shape[:2]
        together = {name: array.reshape(math.prod(count), -1) for name, array in batch.items()}
        gradient, reward = jax.grad(intrinsic.loss_and_reward, has_aux=True)(parameters, together)
        updates, optimizer = optax.adam(learning_rate).update(gradient, optimizer)
        return jax.tree.map(jnp.add, parameters, updates), optimizer, reward.reshape(count)

    def step(carry: tuple[Any, Any], batch: Batch):
        parameters, optimizer, reward = jax.vmap(member, (0, 0, 1), (0, 0, 1))(*carry, batch)
        return (parameters, optimizer), reward

    (parameters, optimizer), reward = jax.lax.scan(step, (parameters, optimizer), batches)
    return parameters, optimizer, reward


@dataclass(frozen=True)
class RND:
    """Random network distillation (arXiv 1810.12894): the error in predicting random features (URLB: 512).

    As in ``rnd.py``, the features are those of the next observation, normalised and clipped.
    """

    hidden: int = 256
    features: int = 64

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        """Initialises the model's parameters, a pytree; ``observation_dim`` excludes the skill."""
        sizes = (observation_dim, self.hidden, self.features)
        return {
            "target": init_mlp(jax.random.fold_in(key, 1), sizes),
            "predictor": init_mlp(jax.random.fold_in(key, 2), sizes),
        }

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The scalar loss of the parameters, and the reward of each transition, [B]."""
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
class APT(ICM):
    """Active pre-training (arXiv 2103.04551): the distance to the nearest particles.

    The entropy of the visited states is estimated from particles: the distance of each to its k nearest
    neighbours in the batch, in the feature space of ICM. As in ``icm_apt.py``, k is 12, distances are divided
    by their mean, and the reward is the log of one plus their average. The particles are the next
    observations, as with our other explorers; URLB uses the current ones. An update has as many particles as
    transitions. The reward is standardised over the batch as in ``ICM``.
    """

    neighbours: int = 12

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        loss, _ = super().loss_and_reward(parameters, batch)
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
    log(1 / S)``. A skill lasts an episode, as in the paper; URLB draws one every 50 steps.
    """

    skills: int = 16
    hidden: int = 256

    def init(self, key: jax.Array, observation_dim: int, action_dim: int) -> Any:
        return init_mlp(key, (observation_dim, self.hidden, self.hidden, self.skills))

    def loss_and_reward(self, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        log_probs = jax.nn.log_softmax(apply_mlp(parameters, batch["next_observation"]))
        log_prob = jnp.sum(log_probs * batch["skill"], -1)
        return -log_prob.mean(), log_prob + math.log(self.skills)


IntrinsicReward = RND | ICM | DIAYN
INTRINSIC_REWARDS = {"rnd": RND(), "icm": ICM(), "icm_apt": APT(), "diayn": DIAYN()}
