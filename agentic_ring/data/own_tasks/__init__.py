"""Tasks that dm_control's suite does not have: ExoRL's and some of our own, one module for each domain.

``make(task, seed)`` of each makes the physics and the task, whose initial states come from ``seed``.
``get_reward`` must read only the simulator it is given, so that one simulator serves all tasks of a domain.
They are entered in ``DOMAINS`` of ``agentic_ring/data/domains.py``; their rewards of stored states are in
``agentic_ring/data/rewards/tasks.py``, how they are explored in ``PLANS`` of ``data_prep/collect.py``.
"""

from importlib import import_module

import numpy as np

from agentic_ring.data.domains import Task, load_suite
from agentic_ring.extras import needs_extra

load_suite()  # without a display GLFW would warn when dm_control's other modules are imported
with needs_extra("rl"):
    from dm_control.mujoco import Physics
    from dm_control.rl.control import Environment
    from dm_control.suite import base


def own_environment(task: Task, seed: int) -> Environment:
    """Makes a new environment of a task that is defined here."""
    domain = task.domain
    physics, own = import_module(f"{__name__}.{domain.name}").make(task.name, seed)
    timestep = domain.control_timestep_seconds
    return Environment(physics, own, time_limit=domain.episode_steps * timestep, control_timestep=timestep)


class UnitActions(base.Task):
    """A task that maps [-1, 1] onto each actuator's range.

    It does what dm_control's ``action_scale`` wrapper does, with which ExoRL recorded (``dmc.py``), but as
    part of the task, so that the environment keeps dm_control's own class.
    """

    def action_spec(self, physics: Physics):
        """[-1, 1] for each of the A actuators."""
        return super().action_spec(physics).replace(minimum=-1.0, maximum=1.0)

    def before_step(self, action: np.ndarray, physics: Physics) -> None:
        """Sets the actuators to ``action`` [A]."""
        lower, upper = physics.model.actuator_ctrlrange.T
        scale = (upper - lower) / 2
        super().before_step(lower + scale * (np.asarray(action, np.float64) + 1), physics)
