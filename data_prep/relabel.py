"""Computes rewards of any task of a domain from the physics states stored with an episode.

    python -m data_prep.relabel --store data/store/walker-rnd.h5 --tasks stand walk run

ExoRL relabels in ``replay_buffer.py:relable_episode`` by resetting the simulator, which also clears
the control. That is wrong where the reward reads the control (cartpole's ``small_control`` factor):
the recorded action is used here, which gives exactly the rewards that the environment paid.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np

from agentic_ring.data.domains import Domain, Task, flatten_observation, load_environment, task_named
from agentic_ring.data.rewards.features import compute_features
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.data.store import StoredEpisode, StoreDescription, TrajectoryStore, write_store
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra
from agentic_ring.terminal.cli import optional_flag, run
from agentic_ring.terminal.progress import progress

# Largest relative difference between the stored observation and the one the physics gives. Float32
# rounding stays below 1e-6; another domain's physics is off by orders of magnitude.
_OBSERVATION_TOLERANCE = 1e-3


class Relabeller:
    """Computes rewards of several tasks from the features of an episode's states.

    Args:
      tasks: short names, such as ``("stand", "run")``.
      control: use the recorded action in rewards that read the control; False zeroes it as ExoRL did.

    Raises:
      UnknownNameError: the domain has no such task.
    """

    def __init__(self, domain: Domain, tasks: Sequence[str], control: bool = True):
        self._domain = domain
        self._rewards = {name: task_reward(task_named(domain, name)) for name in tasks}
        environment = load_environment(Task(domain, domain.tasks[0]), seed=0)
        self._physics, self._task = environment.physics, environment.task
        with needs_extra("rl"):
            import mujoco  # after the environment, which says what is wrong with MUJOCO_GL

        self._first_stages = mujoco.mj_step1  # pyright: ignore[reportAttributeAccessIssue]
        # Whether each dimension of an observation depends on the state only: bool [O].
        entries = self._task.get_observation(self._physics).items()
        self._determined = np.concatenate(
            [np.full(np.size(entry), name not in domain.force_entries) for name, entry in entries]
        )
        self._control = control

    def rewards(self, episode: Episode) -> dict[str, np.ndarray]:
        """Rewards by task: float32 [T + 1], 0 in the reset row."""
        actions = episode.action if self._control else np.zeros_like(episode.action)
        features = compute_features(self._domain, episode.physics, actions)
        rewards = {name: reward(features).astype(np.float32) for name, reward in self._rewards.items()}
        for each in rewards.values():
            each[0] = 0
        return rewards

    def check_physics(self, episode: Episode) -> None:
        """Compares a few stored observations with those computed from the stored physics.

        Forces are not compared (``Domain.force_entries``): they depend on the preceding step as well.

        Raises:
          DataError: they differ, so the physics are of another domain or model.
        """
        for row in sorted({0, len(episode) // 2, len(episode)}):
            self._set_row(episode, row)
            observation = flatten_observation(self._task.get_observation(self._physics))
            error = np.abs(observation - episode.observation[row]) / (1 + np.abs(observation))
            error = error[self._determined]
            if not error.max() <= _OBSERVATION_TOLERANCE:
                raise DataError(
                    f"physics and observation disagree in row {row} (relative error {error.max():.3g}): they "
                    "are of different domains, or of another version of this one"
                )

    def _set_row(self, episode: Episode, row: int) -> None:
        data = self._physics.data.ptr
        velocities = len(data.qpos)
        activations = velocities + len(data.qvel)
        data.qpos[:] = episode.physics[row, :velocities]
        data.qvel[:] = episode.physics[row, velocities:activations]
        data.act[:] = episode.physics[row, activations:]
        # Position and velocity stages with their sensors: all that dm_control itself recomputes
        # after a control step (``Physics.step``), hence all that an observation may read.
        self._first_stages(self._physics.model.ptr, data)


def main(
    store: Path, tasks: Annotated[tuple[str, ...], optional_flag()] = (), exorl_compat: bool = False
) -> None:
    """Computes the task rewards of a store from its physics states.

    Args:
      store: HDF5 store to relabel; it is replaced once the new one is complete.
      tasks: Tasks whose rewards to compute; rewards of other tasks are dropped. Default: all of the domain.
      exorl_compat: Zero the control as ExoRL's own relabelling does, which inflates cartpole's rewards.
    """
    rows, seconds = 0, 0.0
    with TrajectoryStore.open(store) as opened:
        opened.verify()
        tasks = tasks or opened.domain.tasks
        relabeller = Relabeller(opened.domain, tasks, control=not exorl_compat)

        def relabelled() -> Iterator[StoredEpisode]:
            nonlocal rows, seconds
            with progress("relabelling", opened.num_episodes) as advance:
                for number, stored in enumerate(opened.episodes()):
                    start = time.perf_counter()
                    rewards = relabeller.rewards(stored.episode)
                    seconds += time.perf_counter() - start
                    rows += len(stored.episode) + 1
                    yield replace(stored, rewards=rewards)
                    advance(number + 1, f"{rows / seconds:,.0f} rows/s")

        write_store(store, StoreDescription(opened.domain, opened.collector, tasks), relabelled())
    print(f"relabelled {store} at {rows / seconds:,.0f} rows/s")


if __name__ == "__main__":
    run(main)
