"""The tasks of ExoRL's domains that dm_control's suite does not have, and some of our own.

A module a domain, each with ``load(task, seed)``. They are loaded by ``tasks.load_environment`` alone,
which first sets what MuJoCo reads on import. Whatever ``get_reward`` reads comes from the simulator it
is given and not from the task's own, so that one simulator serves all tasks of a domain.
"""
