"""``VectorEnvironments`` that step in processes of their own, each with its share of them.

Most of a control step is Python (dm_control's wrappers and rewards), which threads would run one at a
time. What an environment does depends on its seed and its actions alone, so the episodes are the same
bit for bit however many processes there are.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from agentic_ring.data.tasks import Domain, Task
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from data_prep.collection.vector_environments import VectorEnvironments


class Environments(Protocol):
    """What the collection loop asks of them; see ``VectorEnvironments``."""

    @property
    def decisions(self) -> int:
        """Actions that an episode takes."""
        ...

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Starts one episode in every environment; observations [E, O]."""
        ...

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Holds ``action`` [E, A]; observations [E, O] and rewards [E, K]."""
        ...

    def episodes(self) -> list[Episode]:
        """The E episodes since the last reset."""
        ...


@contextmanager
def open_environments(
    domain: Domain, tasks: Sequence[Task], reward_tasks: Sequence[Task], action_repeat: int, processes: int
) -> Iterator[Environments]:
    """Environments in as many processes, at most one each; in this one if that is 1.

    Raises:
      DataError: within the block, a process died.
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
        """Asks every process at once, and returns their answers in order."""
        try:
            for connection, own in zip(self._connections, arguments, strict=True):
                connection.send((method, own))
            return [connection.recv() for connection in self._connections]
        except (EOFError, ConnectionError) as error:
            raise DataError(
                f"one of the {len(self._processes)} processes that step environments died; what it said "
                "stands above, or memory may be short: run the same command with fewer --processes, it goes "
                "on where it was"
            ) from error


def _serve(connection: Connection, settings: tuple[Any, ...]) -> None:
    """Answers calls until the other end is closed, by its own will or because that process died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent tidies up
    environments = VectorEnvironments(*settings)
    try:
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(environments, method)(*arguments))
    except (EOFError, ConnectionError):
        return
