"""Environments of cue tasks, stepped one after another in this process with dm_control's own physics.

A step is a decision; MuJoCo takes all physics steps of a sub-step in one call.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentic_ring.data.domains import suite_environment
from agentic_ring.data.hidden_tasks.cue_task import CueTask
from agentic_ring.data.hidden_tasks.family import REWARD_KINDS, RewardKind
from agentic_ring.errors import ArgumentError, ConfigError, UnknownNameError
from agentic_ring.extras import needs_extra

with needs_extra("rl"):
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space


class CueEnvironments(VectorEnv):
    """One environment for each of E tasks of one family, whose trials run in lock-step.

    An observation is the body's (``family.body_dim`` entries), the code of the trial's cue (4), and the
    cue's goal divided by ``family.goal_scale`` if ``shows_goal`` (for the oracle), else zeros
    (``family.goal_dim``).

    Raises:
      ConfigError: there is no task, or the tasks are of several families.
      UnknownNameError: there is no such kind of reward.
    """

    def __init__(self, tasks: Sequence[CueTask], reward_kind: RewardKind = "dense", shows_goal: bool = False):
        families = dict.fromkeys(task.family.name for task in tasks)
        if len(families) != 1:
            raise ConfigError(
                f"the tasks are of {', '.join(families) or 'no family'}; give tasks of one family"
            )
        if reward_kind not in REWARD_KINDS:
            raise UnknownNameError("kind of reward", reward_kind, REWARD_KINDS)
        self.family = family = tasks[0].family
        self.tasks = tuple(tasks)
        self._reward_kind: RewardKind = reward_kind
        self._shows_goal = shows_goal
        self._physics = [suite_environment(*family.suite_task, seed=0).physics for _ in tasks]
        self.num_envs = len(tasks)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (family.observation_dim,))
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (family.action_dim,))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._trial = 0
        self._decision = family.decisions

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts a trial in all environments; returns observations float32 [E, O], and no infos.

        Args:
          seed: not used; all that is random is a function of a task's seed and the trial.
          options: ``{"trial": k}`` starts trial k, counted from 0; the default is trial 0.
        """
        self._trial = (options or {}).get("trial", 0)
        self._decision = 0
        shown_cues = [(task, task.cue(self._trial)) for task in self.tasks]
        self._goals = np.stack([task.goals[cue] for task, cue in shown_cues])
        codes = [task.codes[cue] for task, cue in shown_cues]
        shown = self._goals / self.family.goal_scale if self._shows_goal else np.zeros_like(self._goals)
        self._shown = np.concatenate([codes, shown], axis=1).astype(np.float32)
        self._states = np.stack([task.start(self._trial) for task in self.tasks])
        for physics, state in zip(self._physics, self._states, strict=True):
            with physics.reset_context():
                physics.set_state(state)
        return self._observations(), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Holds actions float32 [E, A] in [-1, 1] for one decision.

        Returns:
          Observations float32 [E, O], rewards float64 [E] in [0, 1], terminated bool [E] (never), truncated
          bool [E] (after a trial's last decision, and then an ``ArgumentError``), and no infos.
        """
        family = self.family
        if self._decision == family.decisions:
            raise ArgumentError(f"a trial has {family.decisions} decisions; call reset to begin the next one")
        actions = np.asarray(actions, np.float32)
        path = np.empty((self.num_envs, family.substeps + 1, family.physics_dim), np.float32)
        path[:, 0] = self._states
        for physics, action, states in zip(self._physics, actions, path, strict=True):
            physics.set_control(action)
            for substep in range(1, family.substeps + 1):
                physics.step(family.physics_steps)
                states[substep] = physics.get_state()
        self._states = path[:, -1]
        rewards = family.rewards(path, self._goals, self._reward_kind)[:, 0]
        if self._reward_kind == "coin":
            coins = [task.coin(self._trial, self._decision) for task in self.tasks]
            rewards = (np.array(coins) < rewards).astype(np.float64)
        self._decision += 1
        truncated = np.full(self.num_envs, self._decision == family.decisions)
        return self._observations(), rewards, np.zeros(self.num_envs, bool), truncated, {}

    def _observations(self) -> np.ndarray:
        return np.concatenate([self.family.observe(self._states), self._shown], axis=1)
