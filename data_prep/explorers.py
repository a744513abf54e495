"""Explorers, which choose the actions of a collection: noise, skills, and populations of learners.

They act in E environments for rounds of one episode each, and may learn while they act. All randomness of a
round comes from the generator given to ``begin_round``, and everything that outlives a round is in ``state``
or in the episodes. So a collection that was killed continues after its last complete round with the same
results.
"""

from typing import Any

import numpy as np

from data_prep.learners import JoinedLearners, TD3Learner

# Ranges from which each OU episode draws its parameters: from nearly constant to nearly white noise.
_OU_RATE = (0.02, 0.5)
_OU_SCALE = (0.3, 1.0)


class NoiseExplorer:
    """Explores by uniform noise, or by the Ornstein-Uhlenbeck process (``ou``)."""

    def __init__(self, kind: str, environments: int, action_dim: int):
        self._kind = kind
        self._shape = (environments, action_dim)

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        """Starts a new episode in every environment at ``observation`` [E, O]."""
        self._generator = generator
        self._noise = np.zeros(self._shape)
        self._rate = generator.uniform(*_OU_RATE, (self._shape[0], 1))
        self._scale = generator.uniform(*_OU_SCALE, (self._shape[0], 1))

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns actions [E, A] in [-1, 1] for the observations [E, O]."""
        if self._kind == "random":
            return self._generator.uniform(-1, 1, self._shape)
        # The discretised process with stationary deviation `scale`, started at 0.
        kept = 1 - self._rate
        kick = self._generator.normal(size=self._shape) * self._scale * np.sqrt(1 - kept**2)
        self._noise = kept * self._noise + kick
        return np.clip(self._noise, -1, 1)

    def learn(self) -> None:
        """Starts an update on the observed transitions; need not wait for its result."""

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        """Receives actions [E, A], rewards [E, K] of the learned tasks and next observations [E, O]."""

    def state(self) -> Any:
        """Returns the learner's state, a pytree of arrays, for ``restore``."""
        return ()

    def restore(self, state: Any) -> None: ...

    def labels(self) -> list[dict[str, Any]]:
        """Returns the label of each environment's episode: algorithm, seed, noise."""
        return [{"algorithm": self._kind}] * self._shape[0]


class ReplayBuffer:
    """Arrays for ``episodes`` of D ``decisions`` with K ``rewards`` each; they are added in rounds of E."""

    def __init__(self, episodes: int, decisions: int, observation_dim: int, action_dim: int, rewards: int):
        self._observation = np.zeros((episodes, decisions + 1, observation_dim), np.float32)
        self._action = np.zeros((episodes, decisions, action_dim), np.float32)
        self._reward = np.zeros((episodes, decisions, rewards), np.float32)
        self._decisions = decisions
        self._complete = 0  # number of complete episodes
        self._running = 0  # number of episodes in the current round
        self._round = 0  # number of episodes in a round
        self._step = 0  # decisions taken in the current round

    def begin_round(self, observation: np.ndarray) -> None:
        """Starts E episodes at ``observation`` [E, O]."""
        self._running, self._round, self._step = len(observation), len(observation), 0
        self._observation[self._slice, 0] = observation

    def add(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        """Adds a decision to each running episode: action [E, A], reward [E, K], next observation [E, O]."""
        self._action[self._slice, self._step] = action
        self._reward[self._slice, self._step] = reward
        self._step += 1
        self._observation[self._slice, self._step] = observation
        if self._step == self._decisions:
            self._complete += self._running
            self._running, self._step = 0, 0

    def add_episode(self, observation: np.ndarray, action: np.ndarray, reward: np.ndarray) -> None:
        """Adds a finished episode between rounds: observation [D + 1, O], action [D, A], reward [D, K]."""
        self._observation[self._complete] = observation
        self._action[self._complete] = action
        self._reward[self._complete] = reward
        self._complete += 1

    def observations(self) -> np.ndarray:
        """Returns all observations of complete episodes, [N, O]."""
        return self._observation[: self._complete].reshape(-1, self._observation.shape[-1])

    @property
    def _slice(self) -> slice:
        return slice(self._complete, self._complete + self._running)

    def size(self, horizon: int) -> int:
        """The number of ``horizon``-step transitions that can be drawn."""
        complete = self._complete * (self._decisions - horizon + 1)
        return complete + self._running * max(self._step - horizon + 1, 0)

    def sample(
        self,
        generator: np.random.Generator,
        shape: tuple[int, ...],
        horizon: int,
        discount: float,
        own_share: float = 0.0,
    ) -> dict[str, np.ndarray]:
        """Draws ``horizon``-step transitions uniformly, with replacement.

        Args:
          own_share: share of the draws that are from a member's own episodes, for a shape [..., P, B] of P
            members, whose episodes are neighbours in each round; there must be no other episodes.

        Returns:
          observation [*shape, O], action [*shape, A], reward [*shape, K] discounted over the horizon,
          next_observation [*shape, O]; all float32.
        """
        per_complete = self._decisions - horizon + 1
        draws = generator.integers(self.size(horizon), size=shape)
        split = self._complete * per_complete
        per_running = max(self._step - horizon + 1, 1)
        running = draws >= split
        episode = np.where(running, self._complete + (draws - split) // per_running, draws // per_complete)
        step = np.where(running, (draws - split) % per_running, draws % per_complete)
        if own_share:
            each = self._round // shape[-2]
            member = np.arange(shape[-2])[:, None]
            own = episode - episode % self._round + member * each + episode % each
            episode = np.where(generator.random(shape) < own_share, own, episode)
        reward = sum(discount**k * self._reward[episode, step + k] for k in range(horizon))
        return {
            "observation": self._observation[episode, step],
            "action": self._action[episode, step],
            "reward": np.asarray(reward, np.float32),
            "next_observation": self._observation[episode, step + horizon],
        }


class PopulationExplorer:
    """Explores with Gaussian noise around each member's policy; has the methods of ``NoiseExplorer``.

    Every member learns from the transitions of all members with the reward of its own task. In its M
    environments a member acts with M noise scales, from 0 to ``max_noise``: the first gives consistent
    episodes, the last explores. It acts with its policy before the update that runs at the moment, so that
    the environments need not wait for it.

    Args:
      labels: [P], algorithm, seed and task of each member.
      environments: M.
      updates: critic updates per decision; they are made after every ``period``-th one.
      skills: number of skills S, of which one is drawn for each episode and appended to its observations,
        see ``append_skill``; 0 for none.
      own_share: see ``ReplayBuffer.sample``.
      first_learn_size: transitions to collect with uniform actions before the first update.
    """

    def __init__(
        self,
        learner: TD3Learner | JoinedLearners,
        replay: ReplayBuffer,
        labels: list[dict[str, Any]],
        environments: int,
        updates: int,
        skills: int = 0,
        *,
        period: int = 2,
        own_share: float = 0.0,
        max_noise: float = 0.3,
        first_learn_size: int = 1000,
    ):
        self._learner, self._replay, self._labels, self._skills = learner, replay, labels, skills
        self._noise = np.linspace(0, max_noise, environments)
        self._batch_shape = learner.batch_shape(period * updates)
        self._period, self._own_share = period, own_share
        self._first_learn_size = first_learn_size

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        self._generator, self._decision = generator, 0
        if self._skills:
            self._skill = generator.integers(self._skills, size=len(observation))
        self._exploring = self._replay.size(1) < self._first_learn_size
        if not self._exploring:
            self._learner.begin_round(self._replay.observations())
        self._acting = self._learner.state
        self._replay.begin_round(self._seen(observation))

    def act(self, observation: np.ndarray) -> np.ndarray:
        members, each = len(self._labels), len(self._noise)
        action = self._learner.act(self._acting, self._seen(observation).reshape(members, each, -1))
        if self._exploring:
            return self._generator.uniform(-1, 1, (members * each, action.shape[-1]))
        noise = self._noise[:, None] * self._generator.normal(size=action.shape)
        return np.clip(action + noise, -1, 1).reshape(members * each, -1)

    def learn(self) -> None:
        self._decision += 1
        if self._exploring or self._decision % self._period:
            return
        self._acting = self._learner.state
        returns = self._learner.config.horizon, self._learner.config.discount
        self._learner.update(
            self._replay.sample(self._generator, self._batch_shape, *returns, self._own_share)
        )

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        self._replay.add(action, reward, self._seen(observation))

    def state(self) -> Any:
        return self._learner.state

    def restore(self, state: Any) -> None:
        self._learner.restore(state)

    def labels(self) -> list[dict[str, Any]]:
        first = {"algorithm": "random"} if self._exploring else {}
        noise = [{"action_noise": round(float(scale), 3)} for scale in self._noise]
        labels = [member | scale | first for member in self._labels for scale in noise]
        if not self._skills:
            return labels
        return [label | {"skill": int(skill)} for label, skill in zip(labels, self._skill, strict=True)]

    def _seen(self, observation: np.ndarray) -> np.ndarray:
        return append_skill(observation, self._skill, self._skills) if self._skills else observation


Explorer = NoiseExplorer | PopulationExplorer


def append_skill(observation: np.ndarray, skill: np.ndarray | int, skills: int) -> np.ndarray:
    """Appends one skill per observation, or a common one, as a one-hot vector: [N, O] -> [N, O + S]."""
    one_hot = np.eye(skills, dtype=np.float32)[np.broadcast_to(skill, len(observation))]
    return np.concatenate([observation, one_hot], -1)
