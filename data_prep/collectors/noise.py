"""Explorers without a policy: uniform noise and the Ornstein-Uhlenbeck process."""

from typing import Any, Literal

import numpy as np

# Ranges from which each OU episode draws its parameters: from nearly constant to nearly white noise.
_OU_RATE = (0.02, 0.5)
_OU_SCALE = (0.3, 1.0)


class NoiseExplorer:
    """Explores by noise only; see ``Explorer``."""

    def __init__(self, kind: Literal["random", "ou"], environments: int, action_dim: int):
        self._kind = kind
        self._shape = (environments, action_dim)

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        self._generator = generator
        self._noise = np.zeros(self._shape)
        self._rate = generator.uniform(*_OU_RATE, (self._shape[0], 1))
        self._scale = generator.uniform(*_OU_SCALE, (self._shape[0], 1))

    def act(self, observation: np.ndarray) -> np.ndarray:
        if self._kind == "random":
            return self._generator.uniform(-1, 1, self._shape)
        # The discretised process with stationary deviation `scale`, started at 0.
        kept = 1 - self._rate
        kick = self._generator.normal(size=self._shape) * self._scale * np.sqrt(1 - kept**2)
        self._noise = kept * self._noise + kick
        return np.clip(self._noise, -1, 1)

    def learn(self) -> None:
        pass

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        pass

    def state(self) -> Any:
        return ()

    def restore(self, state: Any) -> None:
        pass

    def labels(self) -> list[dict[str, Any]]:
        label = {"algorithm": self._kind, "task": None, "learner_seed": None, "action_noise": None}
        return [label] * self._shape[0]
