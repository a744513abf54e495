"""Environments of tasks that dm_control's suite does not have: ExoRL's and some of our own.

To add a domain or a task, enter it in ``DOMAINS`` of ``agentic_ring/data/tasks.py``, in ``PLANS`` of
``data_prep/collection/domain_plans.py`` and in ``COORDINATES`` of ``data_prep/state_coverage.py``. If it is
not in dm_control's suite, add a module here, named after the domain, with ``load(task, seed)``.

``get_reward`` must read only the simulator it is given, so that one simulator serves all tasks of a domain.
"""

from agentic_ring.data.tasks import disable_graphics
from agentic_ring.extras import needs_extra

disable_graphics()  # without a display GLFW would warn when dm_control's modules are imported
with needs_extra("rl"):
    import dm_control  # noqa: F401
