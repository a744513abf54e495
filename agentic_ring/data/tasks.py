"""The dm_control domains and tasks, and how ExoRL flattens what they observe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentic_ring.errors import UnknownNameError

if TYPE_CHECKING:
    from dm_control.rl.control import Environment


@dataclass(frozen=True)
class Domain:
    """One body and its physics; tasks of a domain differ only in reward and initial state.

    Attributes:
      observation_dim: O, length of the flattened observation.
      action_dim: A; every action component lies in [-1, 1].
      physics_dim: length of MuJoCo's state, qpos and qvel.
      episode_steps: control steps an episode lasts; no task ends early.
      control_timestep_seconds: simulated time of one control step.
      tasks: dm_control's task names that share this physics, as in ExoRL.
    """

    name: str
    observation_dim: int
    action_dim: int
    physics_dim: int
    episode_steps: int
    control_timestep_seconds: float
    tasks: tuple[str, ...]


DOMAINS = {
    domain.name: domain
    for domain in (
        Domain("walker", 24, 6, 18, 1000, 0.025, ("stand", "walk", "run")),
        Domain("cheetah", 17, 6, 18, 1000, 0.01, ("run",)),
        # ExoRL's two `balance` tasks pay the rewards of these two, from another initial state.
        Domain("cartpole", 5, 1, 4, 1000, 0.01, ("swingup", "swingup_sparse")),
    )
}


@dataclass(frozen=True)
class Task:
    """A reward and an initial state distribution of a domain, such as walker's ``run``."""

    domain: Domain
    name: str

    @property
    def full_name(self) -> str:
        """Domain and task joined, such as ``walker_run``."""
        return f"{self.domain.name}_{self.name}"


def domain_named(name: str) -> Domain:
    """The domain of this name.

    Raises:
      UnknownNameError: there is none.
    """
    if name not in DOMAINS:
        raise UnknownNameError("domain", name, tuple(DOMAINS))
    return DOMAINS[name]


def task_named(domain: Domain, name: str) -> Task:
    """The task of ``domain`` with this short name, such as ``run``.

    Raises:
      UnknownNameError: the domain has none such.
    """
    if name not in domain.tasks:
        raise UnknownNameError(f"task of {domain.name}", name, domain.tasks)
    return Task(domain, name)


def parse_task(full_name: str) -> Task:
    """Reads a full name such as ``cartpole_swingup``.

    Raises:
      UnknownNameError: no domain has such a task.
    """
    tasks = [Task(domain, name) for domain in DOMAINS.values() for name in domain.tasks]
    known = {task.full_name: task for task in tasks}
    if full_name not in known:
        raise UnknownNameError("task", full_name, tuple(known))
    return known[full_name]


def load_environment(task: Task, seed: int) -> Environment:
    """A fresh dm_control environment whose initial states come from ``seed``.

    Nothing is rendered, so MuJoCo's graphics are switched off unless ``MUJOCO_GL`` says otherwise:
    without a display its default would fail on import.
    """
    os.environ.setdefault("MUJOCO_GL", "disabled")
    from dm_control import suite  # after the line above, and slow to import

    return suite.load(task.domain.name, task.name, task_kwargs={"random": seed})


def flatten_observation(observation: Mapping[str, np.ndarray | float]) -> np.ndarray:
    """Joins an observation's entries in their own order, as ExoRL does (``dmc.py``).

    Returns:
      float32 [O].
    """
    return np.concatenate([np.ravel(entry) for entry in observation.values()]).astype(np.float32)
