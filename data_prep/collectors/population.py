"""An explorer with P learners, each in M environments, that share one replay buffer."""

from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_prep.collectors.replay_buffer import ReplayBuffer


class Learner(Protocol):
    """The learning half of a population; its arrays have a leading axis P."""

    horizon: int
    discount: float
    state: Any

    def batch_shape(self, updates: int) -> tuple[int, ...]:
        """The leading shape of the batches that ``update`` takes for this many critic updates."""
        ...

    def begin_round(self, observation: np.ndarray) -> None:
        """Called at the start of a round with all observations collected before it, [N, O]."""
        ...

    def act(self, state: Any, observation: np.ndarray) -> np.ndarray:
        """Returns actions [P, M, A] without noise of the policies in ``state`` for observations [P, M, O]."""
        ...

    def update(self, batches: dict[str, np.ndarray]) -> None:
        """Updates on batches [*batch_shape, ...]; need not wait for the result."""
        ...


def on_own_devices(tree: Any, axis: int) -> Any:
    """Spreads the members of a population, which are along ``axis`` of every array, over the local devices.

    Members are independent, so that each device updates its own without communication. Simulated CPU devices
    thereby use several cores, which products as small as a learner's do not on one device.
    """
    devices = jax.local_devices()
    members = jax.tree.leaves(tree)[0].shape[axis]
    count = max(n for n in range(1, len(devices) + 1) if members % n == 0)
    mesh = Mesh(np.array(devices[:count]), ("member",))
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*[None] * axis, "member")))


class PopulationExplorer:
    """Explores with Gaussian noise around each member's policy; see ``Explorer``.

    Every member learns from the transitions of all members with the reward of its own task. In its M
    environments a member acts with M noise scales, from 0 to ``max_noise``: the first gives consistent
    episodes, the last explores. It acts with its policy before the update that runs at the moment, so that
    the environments need not wait for it.

    Args:
      labels: [P], algorithm, seed and task of each member.
      updates_per_learn: critic updates every ``learn_every`` decisions.
      first_learn_size: transitions to collect with uniform actions before the first update.
    """

    def __init__(
        self,
        learner: Learner,
        replay: ReplayBuffer,
        labels: list[dict[str, Any]],
        environments_per_member: int,
        max_noise: float,
        updates_per_learn: int,
        learn_every: int,
        first_learn_size: int,
    ):
        self._learner, self._replay, self._labels = learner, replay, labels
        self._noise = np.linspace(0, max_noise, environments_per_member)
        self._batch_shape = learner.batch_shape(updates_per_learn)
        self._learn_every, self._first_learn_size = learn_every, first_learn_size

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        self._generator, self._decision = generator, 0
        self._exploring = self._replay.size(1) < self._first_learn_size
        if not self._exploring:
            self._learner.begin_round(self._replay.observations())
        self._acting = self._learner.state
        self._replay.begin_round(observation)

    def act(self, observation: np.ndarray) -> np.ndarray:
        members, each = len(self._labels), len(self._noise)
        action = self._learner.act(self._acting, observation.reshape(members, each, -1))
        if self._exploring:
            return self._generator.uniform(-1, 1, (members * each, action.shape[-1]))
        noise = self._noise[:, None] * self._generator.normal(size=action.shape)
        return np.clip(action + noise, -1, 1).reshape(members * each, -1)

    def learn(self) -> None:
        self._decision += 1
        if self._exploring or self._decision % self._learn_every:
            return
        learner = self._learner
        self._acting = learner.state
        learner.update(
            self._replay.sample(self._generator, self._batch_shape, learner.horizon, learner.discount)
        )

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        self._replay.add(action, reward, observation)

    def state(self) -> Any:
        return self._learner.state

    def restore(self, state: Any) -> None:
        self._learner.state = on_own_devices(state, axis=0)

    def labels(self) -> list[dict[str, Any]]:
        first = "random" if self._exploring else None
        return [
            member | {"action_noise": round(float(noise), 3)} | ({"algorithm": first} if first else {})
            for member in self._labels
            for noise in self._noise
        ]
