"""Environments of tasks that dm_control's suite does not have: ExoRL's and some of our own.

To add a domain or a task, enter it in ``DOMAINS`` of ``agentic_ring/data/tasks.py``, in ``PLANS`` of
``data_prep/collection/domain_plans.py`` and in ``COORDINATES`` of ``data_prep/state_coverage.py``. If it is
not in dm_control's suite, add a module here, named after the domain, with ``load(task, seed)``.

Only ``tasks.load_environment`` imports these modules, after it has set MuJoCo's environment variables.
``get_reward`` must read only the simulator it is given, so that one simulator serves all tasks of a domain.
"""
