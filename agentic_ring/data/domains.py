"""The table of domains and tasks, their environments, and ExoRL's flattening of observations.

To add a domain or a task, enter it in ``DOMAINS`` and in ``PLANS`` of ``data_prep/collect.py``, and its
reward in ``rewards/tasks.py``. Tasks that dm_control's suite lacks are in ``own_tasks/``, in a module named
after the domain with ``make(task, seed)``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from agentic_ring.errors import ConfigError, UnknownNameError
from agentic_ring.extras import needs_extra

if TYPE_CHECKING:
    from dm_control.rl.control import Environment


@dataclass(frozen=True)
class Domain:
    """A body and its physics; the tasks of a domain differ only in reward and initial state."""

    name: str
    observation_dim: int
    """O, length of the flattened observation."""
    action_dim: int
    """A, number of action components, each in [-1, 1]."""
    physics_dim: int
    """Length of MuJoCo's state: qpos, qvel and the activations of actuators that have one."""
    episode_steps: int
    """Control steps per episode; no task ends early."""
    control_timestep_seconds: float
    """Simulated time of one control step."""
    tasks: tuple[str, ...]
    """Names of the tasks that share this physics."""
    own_tasks: tuple[str, ...] = ()
    """Those defined in ``own_tasks/``; dm_control's suite has the others."""
    force_entries: tuple[str, ...] = ()
    """Names of the observation entries that hold forces or accelerations, which do not follow from the stored
    physics."""
    recorded_rewards: int = 1
    """Number of reward columns in ExoRL's files."""
    exploration: str | None = None
    """An own task whose episodes begin anywhere, and which is not among ``tasks``; None if there is none."""

    def decisions(self, action_repeat: int) -> int:
        """Number of decisions per episode if each action is held for ``action_repeat`` control steps."""
        return -(-self.episode_steps // action_repeat)


_WALKER_OWN = ("flip", "run_backward")
_CHEETAH_OWN = ("run_backward", "flip", "flip_backward")
_QUADRUPED = ("stand", "walk", "run", "jump")
_FOUR_SPOTS = ("reach_top_left", "reach_top_right", "reach_bottom_left", "reach_bottom_right")

DOMAINS = {
    domain.name: domain
    for domain in (
        Domain("walker", 24, 6, 18, 1000, 0.025, ("stand", "walk", "run", *_WALKER_OWN), _WALKER_OWN),
        Domain("cheetah", 17, 6, 18, 1000, 0.01, ("run", *_CHEETAH_OWN), _CHEETAH_OWN),
        # ExoRL's two `balance` tasks have the rewards of these two and another initial state.
        Domain("cartpole", 5, 1, 4, 1000, 0.01, ("swingup", "swingup_sparse")),
        # dm_control's own tasks of this body have other action ranges.
        Domain("quadruped", 78, 12, 57, 1000, 0.02, _QUADRUPED, _QUADRUPED, ("imu", "force_torque")),
        Domain(
            *("point_mass_maze", 4, 2, 4, 1000, 0.02, _FOUR_SPOTS, _FOUR_SPOTS),
            recorded_rewards=4,
            exploration="explore",
        ),
        Domain("jaco", 42, 9, 18, 250, 0.04, _FOUR_SPOTS, _FOUR_SPOTS, ("jaco_arm/joints_torque",)),
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


_TASKS = {
    task.full_name: task
    for task in (Task(domain, name) for domain in DOMAINS.values() for name in domain.tasks)
}


def all_tasks() -> tuple[str, ...]:
    """Returns the full names of the tasks of all domains."""
    return tuple(_TASKS)


def domain_named(name: str) -> Domain:
    """Returns the domain with this name; raises an ``UnknownNameError`` if there is none."""
    if name not in DOMAINS:
        raise UnknownNameError("domain", name, tuple(DOMAINS))
    return DOMAINS[name]


def task_named(domain: Domain, name: str) -> Task:
    """Returns the task of ``domain`` with this short name; an ``UnknownNameError`` if there is none."""
    if name not in domain.tasks:
        raise UnknownNameError(f"task of {domain.name}", name, domain.tasks)
    return Task(domain, name)


def parse_task(full_name: str, domain: Domain | None = None) -> Task:
    """Returns the task, of ``domain`` if it is given, with this full name, such as ``walker_run``.

    Raises:
      UnknownNameError: there is none; the error lists those that there are.
    """
    known = tuple(name for name, task in _TASKS.items() if domain in (None, task.domain))
    if full_name not in known:
        raise UnknownNameError("task" if domain is None else f"task of {domain.name}", full_name, known)
    return _TASKS[full_name]


def load_environment(task: Task, seed: int) -> Environment:
    """Makes a new dm_control environment; ``seed`` determines its initial states."""
    if task.name in (*task.domain.own_tasks, task.domain.exploration):
        from agentic_ring.data.own_tasks import own_environment  # loads MuJoCo

        return own_environment(task, seed)
    return suite_environment(task.domain.name, task.name, seed)


def suite_environment(domain: str, task: str, seed: int) -> Environment:
    """Makes a new environment of dm_control's suite; ``seed`` is as above."""
    return load_suite().load(domain, task, task_kwargs={"random": seed})


@cache
def load_suite() -> ModuleType:
    """Imports dm_control's suite, without graphics unless ``MUJOCO_GL`` is set.

    Without a display MuJoCo's import would fail. Where nothing is drawn the sky gets 8 x 8 pixels: in
    800 x 800, as dm_control has it, it takes 11 MB and 0.1 s for each environment.

    Raises:
      ConfigError: ``MUJOCO_GL`` names graphics that this machine does not have.
    """
    os.environ.setdefault("MUJOCO_GL", "disabled")
    logging.getLogger("absl").addFilter(_is_actionable)
    with needs_extra("rl"):
        try:
            from dm_control import suite  # slow, and must come after MUJOCO_GL is set
            from dm_control.suite.common import ASSETS
        except ModuleNotFoundError:
            raise
        except Exception as error:  # a graphics library may raise anything
            if graphics_off():
                raise
            raise ConfigError(
                f"MuJoCo does not start with MUJOCO_GL={os.environ['MUJOCO_GL']} ({error}); unset it, which "
                "draws nothing, or set it to graphics that this machine has: egl, glfw or osmesa"
            ) from error

    if graphics_off():
        ASSETS["./common/skybox.xml"] = ASSETS["./common/skybox.xml"].replace(b'"800"', b'"8"')
    return suite


def graphics_off() -> bool:
    """Whether MuJoCo loads, or has loaded, without graphics."""
    return os.environ.get("MUJOCO_GL", "off").strip().lower() in ("disabled", "disable", "off", "false", "0")


_SUPPRESSED_WARNINGS = (
    "'settotalmass' is deprecated",  # MuJoCo on dm_control's cheetah.xml, once for every environment
    "Failed to converge after",  # an initial pose of Jaco's arm, which dm_control then redraws
)


def _is_actionable(record: logging.LogRecord) -> bool:
    """False for warnings that a user of the environments can do nothing about."""
    return not any(words in record.getMessage() for words in _SUPPRESSED_WARNINGS)


def flatten_observation(observation: Mapping[str, np.ndarray | float]) -> np.ndarray:
    """Concatenates an observation's entries in their own order, as ExoRL does (``dmc.py``): float32 [O]."""
    return np.concatenate([np.ravel(entry) for entry in observation.values()]).astype(np.float32)
