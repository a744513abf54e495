"""A replay buffer of whole episodes, which learners draw transitions from."""

import numpy as np


class ReplayBuffer:
    """Fixed-size arrays [episodes, decisions, ...]; episodes are added in rounds of E.

    Args:
      episodes: capacity in episodes.
      decisions: number of decisions per episode, D.
      rewards: number of rewards per decision, K.
    """

    def __init__(self, episodes: int, decisions: int, observation_dim: int, action_dim: int, rewards: int):
        self._observation = np.zeros((episodes, decisions + 1, observation_dim), np.float32)
        self._action = np.zeros((episodes, decisions, action_dim), np.float32)
        self._reward = np.zeros((episodes, decisions, rewards), np.float32)
        self._decisions = decisions
        self._complete = 0  # number of complete episodes
        self._running = 0  # number of episodes in the current round
        self._step = 0  # decisions taken in the current round

    def begin_round(self, observation: np.ndarray) -> None:
        """Starts E episodes at ``observation`` [E, O]."""
        self._running, self._step = len(observation), 0
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
        self, generator: np.random.Generator, shape: tuple[int, ...], horizon: int, discount: float
    ) -> dict[str, np.ndarray]:
        """Draws ``horizon``-step transitions uniformly, with replacement.

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
        reward = sum(discount**k * self._reward[episode, step + k] for k in range(horizon))
        return {
            "observation": self._observation[episode, step],
            "action": self._action[episode, step],
            "reward": np.asarray(reward, np.float32),
            "next_observation": self._observation[episode, step + horizon],
        }
