"""Contexts of stored random trials of a cue task, with right or spoiled pay, and the policy behind them.

right_pay      the rewards that the task pays for these trials
another_task   those of another task, with other goals
zeroed         0
shuffled       the right rewards, each trial's given to another trial of the context

Random trials are chosen without regard to any goal, so that only their rewards tell the task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from agentic_ring.data.families.cue_task import CueTask
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.family import Pay
from agentic_ring.data.scaling import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.models.agentic_transformer import ChainSteps

StoredPay = Literal["right_pay", "another_task", "zeroed", "shuffled"]
STORED_PAYS: tuple[StoredPay, ...] = get_args(StoredPay)


@dataclass(frozen=True, eq=False)
class StoredTrials:
    """Random stored trials for each of E tasks.

    Attributes:
      number: int [E, n], numbers of the explored trials.
      cue: int [E, n], the cue that each trial shows.
      reward: float64 [E, n, D], what is paid for each decision, rightly or not.
    """

    number: np.ndarray
    cue: np.ndarray
    reward: np.ndarray


def draw_stored_trials(
    store: ExplorationStore, tasks: Sequence[CueTask], trials: int, stored_pay: StoredPay, pay: Pay = "dense"
) -> StoredTrials:
    """Draws random stored trials for each task; only their rewards depend on ``stored_pay``.

    Args:
      store: explored trials.
      tasks: E tasks, all with the same number of cues.
      trials: number of trials of each task.
      stored_pay: the rewards of the stored trials; "another_task" takes those of the next of ``tasks``.
      pay: how decisions are paid.

    Raises:
      ConfigError: the store has fewer trials, or there is no other task whose pay could be taken.
    """
    if trials > store.num_trials:
        raise ConfigError(
            f"a context of {trials} trials is requested, but {store.path} has only {store.num_trials}; use a "
            "shorter context, or explore more trials"
        )
    if stored_pay == "another_task" and len(tasks) < 2:
        raise ConfigError("another task's pay needs two tasks or more; evaluate in more environments")
    paid_by = [*tasks[1:], tasks[0]] if stored_pay == "another_task" else tasks
    rows = [
        _draw_trials(store, task, payer, trials, stored_pay, pay)
        for task, payer in zip(tasks, paid_by, strict=True)
    ]
    return StoredTrials(*(np.stack(field) for field in zip(*rows, strict=True)))


_CONTEXT = 100
"""Purpose of random numbers, other than those of ``CueTask``."""


def _draw_trials(
    store: ExplorationStore, task: CueTask, payer: CueTask, trials: int, stored_pay: StoredPay, pay: Pay
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of ``StoredTrials`` for one task, with rewards of ``payer``."""
    random = np.random.default_rng((task.seed, _CONTEXT))
    number = random.choice(store.num_trials, trials, replace=False)
    cue = random.integers(len(task.goals), size=trials)
    coins = random.random((trials, store.family.decisions))
    reward = store.rewards(number, payer.goals[cue], pay)
    if pay == "coin":
        reward = (coins < reward).astype(np.float64)
    if stored_pay == "zeroed":
        reward = np.zeros_like(reward)
    if stored_pay == "shuffled":
        reward = reward[random.permutation(trials)]
    return number, cue, reward


def as_context(
    stored: StoredTrials, store: ExplorationStore, tasks: Sequence[CueTask], scaling: Scaling
) -> ChainSteps:
    """Steps [E, n x D] of stored trials, which were drawn for ``tasks``; ``scaling`` as in training."""
    family = store.family
    codes = np.stack([task.codes[cue] for task, cue in zip(tasks, stored.cue, strict=True)])
    body = store.observations(stored.number)
    rest = np.concatenate([codes, np.zeros((*codes.shape[:2], family.goal_dim))], axis=2)
    rest = np.broadcast_to(rest[:, :, None], (*body.shape[:3], rest.shape[2]))
    observation = np.concatenate([body, rest], axis=3, dtype=np.float32)
    environments, trials, decisions = stored.reward.shape
    shape = environments, trials * decisions
    index, timestep = np.divmod(np.arange(shape[1], dtype=np.int32), decisions)
    zeros: Any = np.zeros(shape, np.float32)
    place: Any = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    steps: dict[str, Any] = {
        "observation": scaling.observation(observation.reshape(*shape, -1)).astype(np.float32),
        "action": store.actions[stored.number].reshape(*shape, -1),
        "reward": (stored.reward.reshape(shape) / scaling.reward_scale).astype(np.float32),
        "timestep": np.broadcast_to(timestep, shape),
        "trajectory": np.broadcast_to(index, shape),
    }
    return ChainSteps(return_to_go=zeros, completion=zeros, position=place, **steps)


class StoredContextPolicy:
    """Acts as ``policy`` does with only its prompt in context at the beginning of every trial.

    Without a prompt every trial begins without context.
    """

    def __init__(self, policy: InContextPolicy):
        self._policy = policy

    def begin_trial(self) -> None:
        """Removes all earlier trials from the context."""
        self._policy.discard_trials()
        self._policy.begin_trial()

    def act(self, observation: np.ndarray) -> ArrayLike:
        """Actions float32 [E, A] for observations float32 [E, O]."""
        return self._policy.act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Passes on the rewards float32 [E]."""
        self._policy.receive(reward, last)
