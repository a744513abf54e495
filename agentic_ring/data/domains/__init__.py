"""Environments of tasks that dm_control's suite does not have: ExoRL's and some of our own.

To add a domain or a task, enter it in ``DOMAINS`` of ``agentic_ring/data/tasks.py``, in ``PLANS`` of
``data_prep/collect.py``. If it is not in dm_control's suite, add a module here, named after the domain, with
``load(task, seed)``.

``get_reward`` must read only the simulator it is given, so that one simulator serves all tasks of a domain.
"""

import numpy as np

from agentic_ring.data.tasks import disable_graphics
from agentic_ring.extras import needs_extra

disable_graphics()  # without a display GLFW would warn when dm_control's modules are imported
with needs_extra("rl"):
    from dm_control.mujoco import Physics
    from dm_control.suite import base


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
