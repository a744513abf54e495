"""Interface of the explorers, which choose the actions of a collection."""

from typing import Any, Protocol

import numpy as np


class Explorer(Protocol):
    """Acts in E environments for rounds of one episode each, and may learn while it acts.

    All randomness of a round comes from the generator given to ``begin_round``, and everything that outlives
    a round is in ``state`` or in the episodes. So a collection that was killed continues after its last
    complete round with the same results.
    """

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        """Starts a new episode in every environment at ``observation`` [E, O]."""
        ...

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns actions [E, A] in [-1, 1] for the observations [E, O]."""
        ...

    def learn(self) -> None:
        """Starts an update on the observed transitions; need not wait for its result."""
        ...

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        """Receives actions [E, A], rewards [E, K] of the learned tasks and next observations [E, O]."""
        ...

    def state(self) -> Any:
        """Returns the learner's state, a pytree of arrays."""
        ...

    def restore(self, state: Any) -> None:
        """Restores a state that ``state`` returned."""
        ...

    def labels(self) -> list[dict[str, Any]]:
        """Returns the label of each environment's episode: algorithm, seed, noise."""
        ...
