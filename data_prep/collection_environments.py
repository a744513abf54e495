"""Several dm_control environments of one domain, stepped together and recorded row by row.

Gymnasium's vector environments give neither the physics of every control step nor the rewards of several
tasks. Most of a control step is Python (dm_control's wrappers and rewards), which threads would run one at a
time, so the environments may be shared among processes. An environment depends only on its seed and actions,
so the number of processes does not change the episodes, bit for bit.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from agentic_ring.data.domains import Domain, Task, flatten_observation, load_environment
from agentic_ring.data.trajectories import Episode, make_episode
from agentic_ring.errors import DataError
from agentic_ring.stopping import SIGNALS


class VectorEnvironments:
    """E environments that start together and, as no task ends early, end together.

    An action is held for ``action_repeat`` control steps; each control step is recorded as a row of
    its own, so that the episodes are exactly those of an environment without action repeat.

    Args:
      tasks: [E], task whose initial states and recorded rewards each environment uses.
      reward_tasks: [K], tasks whose rewards every environment reports.
    """

    def __init__(
        self, domain: Domain, tasks: Sequence[Task], reward_tasks: Sequence[Task], action_repeat: int
    ):
        self.domain = domain
        self.action_repeat = action_repeat
        self._environments = [load_environment(task, seed=0) for task in tasks]
        self._reward_tasks = [load_environment(task, seed=0).task for task in reward_tasks]
        self._rows: list[list[dict[str, np.ndarray]]] = []

    def __len__(self) -> int:
        return len(self._environments)

    @property
    def decisions(self) -> int:
        """Number of decisions per episode."""
        return self.domain.decisions(self.action_repeat)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Starts one episode in every environment; the seed fixes its initial state.

        Returns:
          The observations, float32 [E, O].
        """
        self._rows = []
        for environment, seed in zip(self._environments, seeds, strict=True):
            environment.task.random.seed(seed)
            time_step = environment.reset()
            self._rows.append([self._row(environment, time_step, np.zeros(self.domain.action_dim))])
        return np.stack([rows[-1]["observation"] for rows in self._rows])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Holds ``action`` [E, A] for ``action_repeat`` control steps, or until the episode's end.

        Returns:
          Observations, float32 [E, O], and the sums of the rewards of each of ``reward_tasks``,
          float32 [E, K].
        """
        action = np.clip(action, -1, 1).astype(np.float32)
        rewards = np.zeros((len(self), len(self._reward_tasks)))
        for e, environment in enumerate(self._environments):
            for _ in range(self.action_repeat):
                time_step = environment.step(action[e])
                self._rows[e].append(self._row(environment, time_step, action[e]))
                paid = [task.get_reward(environment.physics) for task in self._reward_tasks]
                rewards[e] += np.array(paid, np.float32)
                if time_step.last():
                    break
        return np.stack([rows[-1]["observation"] for rows in self._rows]), rewards.astype(np.float32)

    def episodes(self) -> list[Episode]:
        """Returns the E episodes since the last reset."""
        return [
            make_episode({name: np.stack([row[name] for row in rows]) for name in rows[0]}, self.domain)
            for rows in self._rows
        ]

    @staticmethod
    def _row(environment, time_step, action: np.ndarray) -> dict[str, np.ndarray]:
        reward = 0.0 if time_step.first() else time_step.reward
        discount = 1.0 if time_step.first() else time_step.discount
        return {
            "observation": flatten_observation(time_step.observation),
            "action": np.asarray(action, np.float32),
            "reward": np.array([reward], np.float32),
            "discount": np.array([discount], np.float32),
            "physics": environment.physics.get_state().copy(),
        }


@contextmanager
def open_environments(
    domain: Domain, tasks: Sequence[Task], reward_tasks: Sequence[Task], action_repeat: int, processes: int
) -> Iterator["Environments"]:
    """Yields environments in this number of processes, at most one each, or in the current process for 1.

    Raises:
      DataError: a process died within the block.
    """
    if processes == 1:
        yield VectorEnvironments(domain, tasks, reward_tasks, action_repeat)
        return
    environments = _EnvironmentProcesses(domain, tasks, reward_tasks, action_repeat, processes)
    try:
        yield environments
    finally:
        environments.close()


class _EnvironmentProcesses:
    """Has the methods of ``VectorEnvironments`` and calls them in several processes."""

    def __init__(
        self,
        domain: Domain,
        tasks: Sequence[Task],
        reward_tasks: Sequence[Task],
        action_repeat: int,
        processes: int,
    ):
        self.decisions = domain.decisions(action_repeat)
        bounds = np.linspace(0, len(tasks), min(processes, len(tasks)) + 1).astype(int).tolist()
        self._shares = [slice(*pair) for pair in pairwise(bounds)]
        context = multiprocessing.get_context("spawn")  # a fork would copy JAX's threads
        pipes = [context.Pipe() for _ in self._shares]
        self._connections = [here for here, _ in pipes]
        self._processes = []
        for share, (_, there) in zip(self._shares, pipes, strict=True):
            settings = (domain, tasks[share], reward_tasks, action_repeat)
            process = context.Process(target=_serve, args=(there, settings), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        return np.concatenate(self._call("reset", [(seeds[share],) for share in self._shares]))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        stepped = self._call("step", [(action[share],) for share in self._shares])
        observations, rewards = zip(*stepped, strict=True)
        return np.concatenate(observations), np.concatenate(rewards)

    def episodes(self) -> list[Episode]:
        shares = self._call("episodes", [() for _ in self._shares])
        return [episode for share in shares for episode in share]

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method in all processes at once, and returns their results in order."""
        try:
            for connection, own in zip(self._connections, arguments, strict=True):
                connection.send((method, own))
            return [connection.recv() for connection in self._connections]
        except (EOFError, ConnectionError) as error:
            raise DataError(
                f"one of the {len(self._processes)} processes that step environments died; its error is "
                "printed above, or memory ran out: run the same command again, with fewer --processes, to "
                "resume"
            ) from error


Environments = VectorEnvironments | _EnvironmentProcesses


def _serve(connection: Connection, settings: tuple[Any, ...]) -> None:
    """Serves calls until the parent closes the connection or dies."""
    # Ctrl-C, and schedulers' signals, reach the whole group; the parent ends the processes.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    environments = VectorEnvironments(*settings)
    try:
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(environments, method)(*arguments))
    except (EOFError, ConnectionError):
        return
