"""Reference policies of cue tasks: what can be earned without learning, and by learning exactly.

random      uniform actions (``agentic_ring.rollouts.trials.RandomPolicy``)
told        plans to the cue's goal, which the task hides
thompson    knows the body and the reward, and remembers the last n trials: it keeps a weight for each of many
            goals, draws one by weight, plans to it, and draws again once a reward speaks against it
"""

from collections import deque

import numpy as np

from agentic_ring.data.families.environments import CueEnvironments
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.family import TRIAL_DECISIONS, Family, Pay, Region
from agentic_ring.data.families.physics_rollout import PhysicsRollout
from agentic_ring.errors import ConfigError, UnknownNameError
from agentic_ring.rollouts.trials import RandomPolicy
from evals.in_context.contexts import StoredTrials
from evals.in_context.planner import Planner

_GOALS = 3000
"""Goals that are weighed; neighbours are about 1 cm apart on point_mass, 6 mm on reacher, 1 mm/s on
cheetah."""
_REWARD_ERROR = 0.03
"""Standard deviation of a decision's reward around that of the nearest weighed goal. It stands for an error
of 3 mm, 2 mm and 1 cm/s, far below the largest one that earns the full reward."""
_KEPT = 0.1
"""A drawn goal is kept while its weight is at least this share of the largest one."""


class ToldPolicy:
    """Plans to the goal of each trial's cue.

    Args:
      environments: the environments that it acts in.
      planner: plans in their body.
    """

    def __init__(self, environments: CueEnvironments, planner: Planner):
        self._environments = environments
        self._planner = planner
        self._trial = -1

    def begin_trial(self) -> None:
        """Reads the goals of the next trial."""
        self._trial += 1
        tasks = self._environments.tasks
        self._goals = np.stack([task.goals[task.cue(self._trial)] for task in tasks])
        self._plans = None

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Actions float32 [E, A]; the states are read from the environments."""
        states = self._environments.physics_states()
        self._plans = self._planner.actions(states, self._goals, self._plans)
        return self._plans[:, 0].astype(np.float32)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Does nothing: the goal is known."""


class ThompsonPolicy:
    """Thompson sampling with the exact reward of each weighed goal, and a memory of the last trials.

    Args:
      environments: the environments that it acts in, paid "dense".
      planner: plans in their body; its physics also tell the states within a decision.
      trials: number of trials n that are remembered, the current one included.
      region: regions that goals are drawn from, which the policy knows.
      seed: seed of the weighed goals and of the draws.

    Raises:
      ConfigError: ``trials`` is below 1.
    """

    def __init__(
        self, environments: CueEnvironments, planner: Planner, trials: int, region: Region, seed: int
    ):
        if trials < 1:
            raise ConfigError(f"the memory has {trials} trials; it must hold at least the current one")
        self._environments = environments
        self._planner = planner
        self._random = np.random.default_rng(seed)
        self._goals = environments.family.draw_goals(self._random, _GOALS, region)
        # Cues [E] and log likelihoods of the goals [E, M] of each earlier trial, and by cue [E, K, M] of
        # all stored trials.
        self._earlier: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=trials - 1)
        cues = len(environments.tasks[0].goals)
        self._stored = np.zeros((environments.num_envs, cues, _GOALS), np.float32)
        self._trial = -1

    def read(self, stored: StoredTrials, store: ExplorationStore) -> None:
        """Adds stored trials of the environments' tasks to what it remembers in every trial."""
        family = self._environments.family
        for row, (numbers, cues) in enumerate(zip(stored.number, stored.cue, strict=True)):
            for trial, (number, cue) in enumerate(zip(numbers, cues, strict=True)):
                expected = family.rewards(store.physics[number][None], self._goals, "dense")
                self._stored[row, cue] += _log_likelihood(stored.reward[row, trial], expected).sum(axis=1)

    def begin_trial(self) -> None:
        """Recalls what the remembered trials of the same cue say, and draws goals."""
        self._trial += 1
        size = self._environments.num_envs
        self._cues = np.array([task.cue(self._trial) for task in self._environments.tasks])
        self._recalled = self._stored[np.arange(size), self._cues]
        for cues, likelihood in self._earlier:
            self._recalled += np.where((cues == self._cues)[:, None], likelihood, 0)
        self._found = np.zeros((size, _GOALS), np.float32)
        self._drawn = np.full(size, -1)
        self._plans = None
        self._draw()

    def _draw(self) -> None:
        """Draws another goal in each environment where the drawn one has lost its weight."""
        weights = self._recalled + self._found
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        kept = (self._drawn >= 0) & (weights[np.arange(len(weights)), self._drawn] >= _KEPT)
        totals = weights.cumsum(axis=1)
        chosen = (totals < totals[:, -1:] * self._random.random((len(weights), 1))).sum(axis=1)
        self._drawn = np.where(kept, self._drawn, chosen.clip(max=_GOALS - 1))

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Actions float32 [E, A]; the states are read from the environments."""
        self._states = self._environments.physics_states()
        self._plans = self._planner.actions(self._states, self._goals[self._drawn], self._plans)
        self._action = self._plans[:, 0].astype(np.float32)
        return self._action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Weighs the goals by the rewards float32 [E] that each of them would have paid."""
        family = self._environments.family
        path = self._planner.physics.paths(self._states, self._action[:, None])
        expected = family.rewards(path[:, None], self._goals[None], "dense")[..., 0]
        self._found += _log_likelihood(reward[:, None], expected)
        self._draw()
        if last:
            self._earlier.append((self._cues, self._found))


def _log_likelihood(reward: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return -0.5 * ((reward - expected) / _REWARD_ERROR) ** 2


def check_reference(name: str, family: Family, pay: Pay) -> None:
    """Checks that a reference policy, told or thompson with any memory, knows what it is meant to know.

    Raises:
      ConfigError: trials do not have 8 decisions, which the planner's horizon is made for; or Thompson
        sampling would weigh goals by rewards that are not dense.
    """
    if pay != "dense" and name.startswith("thompson"):
        raise ConfigError(
            f"Thompson sampling weighs goals by dense rewards, and decisions are paid {pay}; leave it out"
        )
    if family.decisions != TRIAL_DECISIONS:
        raise ConfigError(
            f"the reference policies plan for trials of {TRIAL_DECISIONS} decisions, and those of "
            f"{family.name} have {family.decisions}; leave them out"
        )


def reference_policy(
    name: str, environments: CueEnvironments, region: Region, seed: int
) -> RandomPolicy | ToldPolicy | ThompsonPolicy:
    """Makes a reference policy: "random", "told", or "thompson_n" with a memory of n trials.

    Args:
      name: the policy.
      environments: the environments that it acts in.
      region: regions of their goals.
      seed: seed of all that is random in the policy.

    Raises:
      UnknownNameError: there is no such policy.
      ConfigError: see ``check_reference``; or a memory of 0 trials.
    """
    if name == "random":
        return RandomPolicy(environments.num_envs, environments.family.action_dim, seed)
    memory = name.removeprefix("thompson_")
    if name != "told" and not (memory != name and memory.isdecimal()):
        raise UnknownNameError("reference", name, ("random", "told", "thompson_1, thompson_2, ..."))
    family = environments.family
    check_reference(name, family, environments.pay)
    planner = Planner(family, PhysicsRollout(family), np.random.default_rng((seed, 1)))
    if name == "told":
        return ToldPolicy(environments, planner)
    return ThompsonPolicy(environments, planner, int(memory), region, seed)


def regret(returns: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Cumulative sum over trials of what returns [..., trials] fall short of ``best`` [..., trials]."""
    return np.cumsum(best - returns, axis=-1)
