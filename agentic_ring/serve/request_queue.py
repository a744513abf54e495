"""One request is worked on at a time; a few wait, and the rest are told when to come back."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class BusyError(Exception):
    """All places are taken.

    Attributes:
      retry_after: seconds after which to try again.
    """

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests wait already; try again in {retry_after} s")
        self.retry_after = retry_after


class AbandonedError(Exception):
    """Nobody waits for the answer any more."""


class Turns:
    """Of work in threads, in the order of its arrival.

    Args:
      places: requests that may wait while one is worked on.
    """

    def __init__(self, places: int):
        self._lock = asyncio.Lock()
        self._places = places
        self._inside = 0
        self._waiting: set[asyncio.Task] = set()
        self._seconds = 1.0

    def start(self, work: Callable[[], Result]) -> asyncio.Task[Result]:
        """Queues work; ``leave`` takes it back.

        Raises:
          BusyError: too many wait.
        """
        if self._inside > self._places:
            raise BusyError(self._places, max(1, math.ceil(self._seconds)))
        self._inside += 1
        task = asyncio.create_task(self._in_turn(work))
        self._waiting.add(task)
        task.add_done_callback(self._ended)
        return task

    def leave(self, task: asyncio.Task) -> None:
        """Nobody wants the work any more: its place is free at once, unless it is under way."""
        if task in self._waiting:
            task.cancel()

    async def _in_turn(self, work: Callable[[], Result]) -> Result:
        async with self._lock:
            self._waiting.discard(asyncio.current_task())
            started = time.monotonic()
            try:
                return await asyncio.to_thread(work)
            finally:
                self._seconds = time.monotonic() - started

    def _ended(self, task: asyncio.Task) -> None:
        self._inside -= 1
        self._waiting.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, for whoever asked may be gone
