"""The request queue: requests are prepared one at a time and answered together where they fit together.

    submit -> prepare (a thread) -> prepared requests -> work (another thread) -> result
              the next request       in order of arrival   the oldest, and those that it takes along

A few requests wait; further ones are refused.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")

Take = Callable[[Callable[[Request], bool]], list[Request]]
"""Takes those prepared requests out of the queue, in order of arrival, for which a function is true."""
Finish = Callable[[Request, Result], None]
"""Gives a request its result."""


Work = Callable[[Request, Take[Request], Finish[Request, Result]], object]
"""Finishes a request and all that it takes."""


class BusyError(Exception):
    """The queue is full; the client should try again after ``retry_after`` seconds."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class AbandonedError(Exception):
    """The client has disconnected."""


class _Entry:
    """A request in the queue."""

    def __init__(self, result: asyncio.Future):
        self.result = result
        self.request: Any = None
        self.started = False


class RequestQueue(Generic[Request, Result]):
    """Prepares requests and works on them, each in a thread of its own, in order of arrival.

    Args:
      size: requests that may wait while others are worked on.
      work: works on the oldest prepared request and those that it takes; an error is the result of each of
        them that is not finished.
    """

    def __init__(self, size: int, work: Work[Request, Result]):
        self._size = size
        self._work = work
        # Of their own, so that nothing else waits for them, and they for nothing else.
        self._preparation = ThreadPoolExecutor(1, thread_name_prefix="preparation")
        self._generation = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._entries: dict[asyncio.Task, _Entry] = {}
        self._prepared: list[_Entry] = []
        self._lock = threading.Lock()  # of ``_prepared`` and ``_Entry.started``
        self._worker: asyncio.Task | None = None
        self._last_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return sum(not entry.started for entry in list(self._entries.values()))

    def submit(self, prepare: Callable[[], Request]) -> asyncio.Task[Result]:
        """Queues a request, which ``prepare`` makes; ``cancel`` removes it.

        Raises:
          BusyError: the queue is full.
        """
        waiting = self.waiting
        idle = waiting == len(self._entries)
        if waiting >= self._size + idle:
            raise BusyError(waiting, max(1, math.ceil(self._last_seconds)))
        entry = _Entry(asyncio.get_running_loop().create_future())
        task = asyncio.create_task(self._run(entry, prepare))
        self._entries[task] = entry
        task.add_done_callback(self._finished)
        return task

    def cancel(self, task: asyncio.Task) -> None:
        """Removes a waiting request from the queue at once; work that has started is not interrupted."""
        entry = self._entries.get(task)
        if entry is not None and not entry.started:
            task.cancel()

    async def _run(self, entry: _Entry, prepare: Callable[[], Request]) -> Result:
        loop = asyncio.get_running_loop()
        entry.request = await loop.run_in_executor(self._preparation, prepare)
        with self._lock:
            self._prepared.append(entry)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work_on_prepared())
        try:
            return await entry.result
        finally:
            self._take(lambda request: request is entry.request)

    async def _work_on_prepared(self) -> None:
        while self._prepared:
            started = time.monotonic()
            await asyncio.get_running_loop().run_in_executor(self._generation, self._work_on_oldest)
            self._last_seconds = time.monotonic() - started

    def _work_on_oldest(self) -> None:
        entries = self._take(lambda request: True, most=1)
        if not entries:
            return  # its client has left

        def take(fits: Callable[[Request], bool]) -> list[Request]:
            found = self._take(fits)
            entries.extend(found)
            return [entry.request for entry in found]

        def finish(request: Request, result: Result) -> None:
            (entry,) = (entry for entry in entries if entry.request is request)
            entry.result.get_loop().call_soon_threadsafe(_set, entry.result, result)

        try:
            self._work(entries[0].request, take, finish)
        except Exception as error:
            for entry in entries:
                entry.result.get_loop().call_soon_threadsafe(_set, entry.result, error)

    def _take(self, fits: Callable[[Request], bool], most: int | None = None) -> list[_Entry]:
        with self._lock:
            found = [entry for entry in self._prepared[:most] if fits(entry.request)]
            for entry in found:
                self._prepared.remove(entry)
                entry.started = True
        return found

    def _finished(self, task: asyncio.Task) -> None:
        del self._entries[task]
        if not task.cancelled():
            task.exception()  # retrieved here, since the client may have left


def _set(future: asyncio.Future, result: Any) -> None:
    """Sets a result or an error, unless there is one or the client has left."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
