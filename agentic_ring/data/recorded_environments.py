"""Several dm_control environments of one domain, stepped together and recorded row by row.

Gymnasium's vector environments give neither the physics of every control step nor several rewards. Most of
a control step is Python, which threads would run one at a time, so the environments may be shared among
processes. An environment depends only on its seed and actions, so the number of processes does not change
the episodes, bit for bit.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from agentic_ring.data.domains import Domain, Task, flatten_observation, load_environment
from agentic_ring.data.rewards.features import compute_features
from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.trajectories import Episode, make_episode
from agentic_ring.errors import DataError
from agentic_ring.stopping import SIGNALS


class VectorEnvironments:
    """E environments that start together and, as no task ends early, end together.

    An action is held for ``action_repeat`` control steps; each control step is recorded as a row of
    its own, so that the episodes are exactly those of an environment without action repeat.

    Args:
      tasks: [E], task whose initial states and recorded rewards each environment uses.
      rewards: [K], what every environment reports besides its task's reward.

    Attributes:
      decisions: number of decisions per episode.
    """

    def __init__(
        self, domain: Domain, tasks: Sequence[Task], rewards: Sequence[RewardOfFeatures], action_repeat: int
    ):
        self._domain, self._rewards, self._action_repeat = domain, rewards, action_repeat
        self.decisions = domain.decisions(action_repeat)
        self._environments = [load_environment(task, seed=0) for task in tasks]
        self._rows: list[list[dict[str, np.ndarray]]] = []

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Starts one episode in every environment; returns the observations, float32 [E, O]."""
        self._rows = []
        for environment, seed in zip(self._environments, seeds, strict=True):
            environment.task.random.seed(seed)
            time_step = environment.reset()
            self._rows.append([self._row(environment, time_step, np.zeros(self._domain.action_dim))])
        return self._observations()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Holds ``action`` [E, A] for ``action_repeat`` control steps, or until the episode's end.

        Returns observations, float32 [E, O], and the sums of each reward, float32 [E, K].
        """
        action, before = np.clip(action, -1, 1).astype(np.float32), len(self._rows[0])
        for environment, rows, held in zip(self._environments, self._rows, action, strict=True):
            for _ in range(self._action_repeat):
                time_step = environment.step(held)
                rows.append(self._row(environment, time_step, held))
                if time_step.last():
                    break
        new = [rows[before:] for rows in self._rows]  # as many for each, [E, n]
        states = (np.stack([row[name] for row in chain(*new)]) for name in ("physics", "action"))
        rewards = control_step_rewards(self._domain, self._rewards, *states)
        summed = rewards.reshape(len(new), len(new[0]), len(self._rewards)).sum(1, np.float64)
        return self._observations(), summed.astype(np.float32)

    def episodes(self) -> list[Episode]:
        """Returns the E episodes since the last reset."""
        return [
            make_episode({name: np.stack([row[name] for row in rows]) for name in rows[0]}, self._domain)
            for rows in self._rows
        ]

    def _observations(self) -> np.ndarray:
        return np.stack([rows[-1]["observation"] for rows in self._rows])

    @staticmethod
    def _row(environment, time_step, action: np.ndarray) -> dict[str, np.ndarray]:
        reward, discount = (0.0, 1.0) if time_step.first() else (time_step.reward, time_step.discount)
        return {
            "observation": flatten_observation(time_step.observation),
            "action": np.asarray(action, np.float32),
            "reward": np.array([reward], np.float32),
            "discount": np.array([discount], np.float32),
            "physics": environment.physics.get_state().copy(),
        }


def control_step_rewards(
    domain: Domain, rewards: Sequence[RewardOfFeatures], physics: np.ndarray, actions: np.ndarray
) -> np.ndarray:
    """Returns each of K rewards of the states [R, P] to which the actions [R, A] led, float32 [R, K]."""
    if not rewards:
        return np.zeros((len(physics), 0), np.float32)
    features = compute_features(domain, physics, actions)
    return np.stack([reward(features) for reward in rewards], axis=-1, dtype=np.float32)


@dataclass(frozen=True)
class _EnvironmentProcesses:
    """Has the methods of ``VectorEnvironments`` and calls them in several processes."""

    decisions: int
    shares: list[slice]
    """Environments of each process."""
    connections: list[Connection]

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        return np.concatenate(self._call("reset", seeds))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        observations, rewards = zip(*self._call("step", action), strict=True)
        return np.concatenate(observations), np.concatenate(rewards)

    def episodes(self) -> list[Episode]:
        return list(chain(*self._call("episodes")))

    def _call(self, method: str, *arguments: Sequence[int] | np.ndarray) -> list[Any]:
        """Calls a method in all processes with their share of the arguments; returns the results in order."""
        try:
            for connection, share in zip(self.connections, self.shares, strict=True):
                connection.send((method, [each[share] for each in arguments]))
            return [connection.recv() for connection in self.connections]
        except (EOFError, ConnectionError) as error:
            raise DataError(
                f"one of the {len(self.shares)} processes that step environments died; its error is printed "
                "above, or memory ran out: run the same command again, with fewer --processes, to resume"
            ) from error


Environments = VectorEnvironments | _EnvironmentProcesses


@contextmanager
def open_environments(
    domain: Domain,
    tasks: Sequence[Task],
    rewards: Sequence[RewardOfFeatures],
    action_repeat: int,
    processes: int,
) -> Iterator[Environments]:
    """Yields environments in this number of processes, at most one each; a ``DataError`` if one dies."""
    if processes == 1:
        yield VectorEnvironments(domain, tasks, rewards, action_repeat)
        return
    bounds = np.linspace(0, len(tasks), min(processes, len(tasks)) + 1).astype(int).tolist()
    shares = [slice(*pair) for pair in pairwise(bounds)]
    context = multiprocessing.get_context("spawn")  # a fork would copy JAX's threads
    connections = []
    with ExitStack() as stack:
        for share in shares:
            here, there = context.Pipe()
            settings = there, domain, tasks[share], rewards, action_repeat
            process = context.Process(target=_serve, args=settings, daemon=True)
            process.start()
            there.close()
            stack.callback(process.join)
            connections.append(stack.enter_context(here))  # once it is closed, the process ends
        yield _EnvironmentProcesses(domain.decisions(action_repeat), shares, connections)


def _serve(connection: Connection, *settings: Any) -> None:
    """Serves calls until the parent closes the connection or dies."""
    # Ctrl-C, and schedulers' signals, reach the whole group; the parent ends the processes.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    environments = VectorEnvironments(*settings)
    with suppress(EOFError, ConnectionError):
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(environments, method)(*arguments))
