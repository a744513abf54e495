"""Every task as a gymnasium environment, registered when this module is imported.

    gymnasium.make("agentic_ring.data.gymnasium_environments:agentic_ring/jaco_reach_top_left-v0")

After an import of this module ``agentic_ring/jaco_reach_top_left-v0`` suffices. Shimmy's ids
(``dm_control/walker-run-v0``) lack ExoRL's own tasks. Observations are flat, in ExoRL's order. As with
shimmy's environments, ``reset(seed=...)`` fixes the initial state, and an episode is truncated at its end.
"""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from agentic_ring.data.tasks import all_tasks, flatten_observation, load_environment, parse_task
from agentic_ring.extras import needs_extra

with needs_extra("rl"):
    import gymnasium

if TYPE_CHECKING:
    from dm_control.rl.control import Environment


class FlatObservation(gymnasium.ObservationWrapper):
    """Joins dm_control's named observations into one float32 vector [O], in ExoRL's order.

    gymnasium's own flattening sorts the names, which gives another order: walker observes its orientations
    before its height.
    """

    def __init__(self, env: gymnasium.Env, observation_dim: int):
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observation_dim,), np.float32)

    def observation(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """Flattens one named observation."""
        return flatten_observation(observation)


def named_environment(environment: "Environment", **rendering: Any) -> gymnasium.Env:
    """Wraps a dm_control environment with shimmy: named float64 observations, actions [A] in [-1, 1].

    Args:
      environment: made by ``load_environment``.
      rendering: shimmy's ``render_mode`` and ``render_kwargs``.
    """
    # dm_control.composer turns all deprecation warnings on, for good
    with needs_extra("rl"), warnings.catch_warnings():
        from shimmy import DmControlCompatibilityV0  # loads MuJoCo, so only after MUJOCO_GL is set

    return DmControlCompatibilityV0(environment, **rendering)


def make(task: str, seed: int = 0, **rendering: Any) -> gymnasium.Env:
    """Makes a registered environment; the entry point of all of them.

    Args:
      task: full name, such as ``jaco_reach_top_left``.
      seed: seed of the initial states, until ``reset`` is given one.
      rendering: ``render_mode`` and ``render_kwargs``; needs ``MUJOCO_GL``.

    Raises:
      UnknownNameError: there is no such task.
    """
    parsed = parse_task(task)
    environment = named_environment(load_environment(parsed, seed), **rendering)
    return FlatObservation(environment, parsed.domain.observation_dim)


for _task in all_tasks():
    gymnasium.register(f"agentic_ring/{_task}-v0", entry_point=f"{__name__}:make", kwargs={"task": _task})
