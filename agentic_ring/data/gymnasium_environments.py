"""Every task as a gymnasium environment, registered when this module is imported.

    gymnasium.make("agentic_ring.data.gymnasium_environments:agentic_ring/jaco_reach_top_left-v0")

After an import of this module ``agentic_ring/jaco_reach_top_left-v0`` suffices. ``gymnasium.make_vec`` makes
several, which a trained policy can act in: after an episode they are reset in the same step. Shimmy's ids
(``dm_control/walker-run-v0``) lack ExoRL's own tasks. Observations are flat, in ExoRL's order. As with
shimmy's environments, ``reset(seed=...)`` fixes the initial state, and an episode is truncated at its end.

``make_environments`` makes several for trials in lock-step, stepped one after another in this process: on two
cores as fast as gymnasium's AsyncVectorEnv, which would start a process of 100 MB for every environment.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from agentic_ring.data.domains import (
    Task,
    all_tasks,
    flatten_observation,
    graphics_off,
    load_environment,
    parse_task,
)
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.extras import needs_extra

with needs_extra("rl"):
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

if TYPE_CHECKING:
    from dm_control.rl.control import Environment


class FlatObservation(gymnasium.ObservationWrapper):
    """Joins dm_control's named observations into one float32 vector [O], in ExoRL's order.

    gymnasium's own flattening would sort the names.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        shape = (gymnasium.spaces.flatdim(env.observation_space),)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)

    def observation(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """Flattens one named observation."""
        return flatten_observation(observation)


def named_environment(environment: "Environment", **rendering: Any) -> gymnasium.Env:
    """Wraps a dm_control environment with shimmy: named float64 observations, actions [A] in [-1, 1].

    ``rendering`` are shimmy's ``render_mode`` and ``render_kwargs``.
    """
    # dm_control.composer turns all deprecation warnings on, for good
    with needs_extra("rl"), warnings.catch_warnings():
        from shimmy import DmControlCompatibilityV0  # loads MuJoCo, so only after MUJOCO_GL is set

    return DmControlCompatibilityV0(environment, **rendering)


def make(task: str, seed: int | None = None, **rendering: Any) -> gymnasium.Env:
    """Makes a registered environment; the entry point of all of them.

    Args:
      task: full name, such as ``jaco_reach_top_left``; another one raises an ``UnknownNameError``.
      seed: seed of the initial states, until ``reset`` is given one; None draws one.
      rendering: ``render_mode`` and ``render_kwargs``.

    Raises:
      ConfigError: a ``render_mode`` where MuJoCo's graphics are off.
    """
    if rendering.get("render_mode") and graphics_off():
        raise ConfigError(
            f"render_mode is {rendering['render_mode']!r}, but graphics are off where MUJOCO_GL is not set; "
            "start Python with MUJOCO_GL=egl, or with glfw or osmesa"
        )
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    return FlatObservation(named_environment(load_environment(parse_task(task), seed), **rendering))


def make_vector(num_envs: int, task: str, **rendering: Any) -> SyncVectorEnv:
    """Makes several, whose first observation of an episode comes with the last reward of the one before.

    By default gymnasium's vectors spend a step between two episodes, which a policy would take for one of the
    second.
    """
    each = [partial(make, task, **rendering)] * num_envs
    return SyncVectorEnv(each, autoreset_mode=AutoresetMode.SAME_STEP)


for _task in all_tasks():
    gymnasium.register(
        f"agentic_ring/{_task}-v0",
        entry_point=f"{__name__}:make",
        vector_entry_point=f"{__name__}:make_vector",
        kwargs={"task": _task},
    )


class TrialEnvironment(gymnasium.Wrapper):
    """An environment for trials, each action of which is held for several control steps.

    The initial state of a trial is a function of (``seed``, trial) and nothing else, so that every policy and
    every control starts from the same initial states, in any order. ``reset(options={"trial": k})`` starts
    trial k, counted from 0; the default is trial 0.
    """

    def __init__(self, task: Task, seed: int, action_repeat: int):
        self._control = load_environment(task, seed)
        super().__init__(named_environment(self._control))
        self._seed = seed
        self._repeats = action_repeat

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts a trial; ``seed``, if not None, replaces the environment's own seed from now on."""
        self._seed = self._seed if seed is None else seed
        trial = (options or {}).get("trial", 0)
        state = np.random.SeedSequence((self._seed, trial)).generate_state(1)
        return self.env.reset(seed=int(state[0]))

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Repeats ``action`` [A] until an episode ends at most; returns the sum of the rewards, no infos."""
        observation, total, terminated, truncated = None, 0.0, False, False
        for _ in range(self._repeats):
            observation, reward, terminated, truncated, _ = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, {}

    def physics_state(self) -> np.ndarray:
        """A copy of MuJoCo's state, float64 [P]: qpos, qvel and activations, to render the trial later."""
        return np.array(self._control.physics.get_state(), np.float64)


def make_environment(task: Task, seed: int, action_repeat: int) -> gymnasium.Env:
    """One dm_control environment for trials: flat float32 observations [O], actions [A] in [-1, 1]."""
    return FlatObservation(TrialEnvironment(task, seed, action_repeat))


def make_environments(task: Task, seeds: Sequence[int], action_repeat: int = 1) -> SyncVectorEnv:
    """Environments of one task that step together: observations float32 [E, O], rewards float64 [E].

    No environment resets itself at an episode's end; ``reset(options={"trial": k})`` starts trial k in
    all of them. Environments with the same seed and the same actions behave identically.

    Args:
      task: defines rewards and initial states.
      seeds: one for each of the E environments, at least 0.
      action_repeat: control steps for which an action is repeated; their rewards are summed.

    Raises:
      ArgumentError: no seeds, a negative one, or an action repeat below 1.
    """
    if len(seeds) == 0 or min(seeds) < 0 or action_repeat < 1:
        raise ArgumentError(
            f"seeds is {list(seeds)} and action_repeat is {action_repeat}; give one number >= 0 for each "
            "environment, and repeat actions at least once"
        )
    return SyncVectorEnv(
        [partial(make_environment, task, seed, action_repeat) for seed in seeds],
        autoreset_mode=AutoresetMode.DISABLED,
    )


def shared_environments(
    task: Task, first_seed: int, environments: int, parts: int, action_repeat: int
) -> list[SyncVectorEnv]:
    """``environments`` in equal ``parts`` that are stepped separately, with seeds from ``first_seed`` on."""
    share = environments // parts
    firsts = range(first_seed, first_seed + environments, share)
    return [make_environments(task, range(first, first + share), action_repeat) for first in firsts]
