"""What the collection loop asks of whatever chooses the actions."""

from typing import Any, Protocol

import numpy as np


class Explorer(Protocol):
    """Acts in E environments for rounds of one episode each, and may learn meanwhile.

    All randomness of a round comes from the generator given to ``begin_round``, and everything that
    outlives a round is in ``state`` or in the episodes themselves: a run that was killed goes on from
    its last complete round as if nothing had happened.
    """

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        """A new episode starts in every environment at ``observation`` [E, O]."""
        ...

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Actions [E, A] in [-1, 1] for the observations [E, O]."""
        ...

    def learn(self) -> None:
        """Starts learning from what was observed so far; need not wait for the result."""
        ...

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        """What the actions [E, A] led to: rewards [E, K] of the tasks learned from, observations [E, O]."""
        ...

    def state(self) -> Any:
        """A pytree of arrays."""
        ...

    def restore(self, state: Any) -> None:
        """Takes back what ``state`` returned."""
        ...

    def labels(self) -> list[dict[str, Any]]:
        """For each environment, what a reader of its episode should know: algorithm, seed, noise."""
        ...
