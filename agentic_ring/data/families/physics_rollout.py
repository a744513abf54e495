"""MuJoCo's physics of a family's body, stepped for many states at once in C."""

import numpy as np

from agentic_ring.data.families.family import Family
from agentic_ring.extras import needs_extra

with needs_extra("rl"):
    import mujoco
    from mujoco.rollout import Rollout


class PhysicsRollout:
    """Steps bodies through decisions; the results do not depend on the number of threads.

    Args:
      family: the body.
      threads: number of threads; 0 steps in the calling one.
    """

    def __init__(self, family: Family, threads: int = 0):
        self._family = family
        self._model = family.load_physics().model.ptr
        self._data = [mujoco.MjData(self._model) for _ in range(max(1, threads))]  # pyright: ignore[reportAttributeAccessIssue]
        self._rollout = Rollout(nthread=threads)

    def paths(self, states: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Returns the states at the start and after each reward sub-step, float64 [N, D x substeps + 1, P].

        Args:
          states: initial states [N, P].
          actions: actions [N, D, A] in [-1, 1], held for a decision each.
        """
        every = self._family.physics_steps
        states = np.asarray(states, np.float64)
        time_and_state = np.concatenate([np.zeros((len(states), 1)), states], axis=1)
        control = np.asarray(actions, np.float64).repeat(self._family.substeps * every, axis=1)
        stepped = np.asarray(self._rollout.rollout(self._model, self._data, time_and_state, control)[0])
        return np.concatenate([states[:, None], stepped[:, every - 1 :: every, 1:]], axis=1)
