"""Context windows of whole trials, which hold exactly the last n of them.

A cache whose oldest entries are dropped does not do: in the upper layers, a kept entry was computed from the
dropped ones. Here the kept trials are encoded again at the beginning of each trial, from position 0:

    n = 3    trial 0   trial 1   trial 2   trial 3   trial 4
    context  0         0 1       0 1 2       1 2 3       2 3 4      the last one is the current trial
    encoded  -         -         -           1 2         2 3        the others are in the cache
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from agentic_ring.errors import ConfigError
from agentic_ring.inference import InContextPolicy
from agentic_ring.models.agentic_transformer import ChainSteps


class TrialWindowPolicy:
    """Acts as ``policy`` does with exactly the last ``trials`` trials in context, the current one included.

    With a window of 1 every trial begins without context.

    Args:
      policy: has no prompt, and holds the decisions of ``trials`` trials.
      trials: number of trials n in the window.

    Raises:
      ConfigError: ``trials`` is below 1.
    """

    def __init__(self, policy: InContextPolicy, trials: int):
        if trials < 1:
            raise ConfigError(f"the window has {trials} trials; it must hold at least the current one")
        self._policy = policy
        self._earlier: deque[list[ChainSteps]] = deque(maxlen=trials - 1)
        self._current: list[ChainSteps] = []
        self._trials = trials
        self._begun = 0

    def begin_trial(self) -> None:
        """Removes the oldest trial from a full window, and encodes the others again."""
        if self._begun >= self._trials:
            self._policy.start_over(as_prompt(self._earlier))
        self._begun += 1
        self._policy.begin_trial()

    def act(self, observation: np.ndarray) -> ArrayLike:
        """Actions float32 [E, A] for observations float32 [E, O]."""
        return self._policy.act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Records the rewards float32 [E] of the last actions; ``last`` ends the trial."""
        self._policy.receive(reward, last)
        self._current.append(self._policy.last_step)
        if last:
            self._earlier.append(self._current)
            self._current = []


def as_prompt(trials: Sequence[list[ChainSteps]]) -> ChainSteps | None:
    """The steps of trials as one prompt [E, S], counted from 0; None for no trials."""
    steps = [step for trial in trials for step in trial]
    if not steps:
        return None
    joined = ChainSteps.joined(steps)
    shape = joined.position.shape
    numbers = np.repeat(np.arange(len(trials), dtype=np.int32), [len(trial) for trial in trials])
    return replace(
        joined,
        position=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        trajectory=np.broadcast_to(numbers, shape),
    )
