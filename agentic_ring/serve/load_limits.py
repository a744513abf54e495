"""Limits on clients at once: connections that slow ones cannot hold, and a queue that refuses requests.

uvicorn's own ``limit_concurrency`` refuses new clients while slow ones hold all connections. It waits without
end for a request's head and for a client that does not read its answer, and its reply to invalid HTTP amid a
request is an error of its own.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentic_ring.serve.generation import AbandonedError, GenerationRequest, TextGenerator

CONNECTIONS = 256
"""Maximum number of open connections; a further one closes the oldest that is not waiting for an answer."""
HEAD_SECONDS = 10.0
"""Time for the head of a request, from the connection or the last answer on."""
WRITE_SECONDS = 30.0
"""Time during which a client may accept no more of its answer."""


class LimitedConnection(H11Protocol):
    """A connection of the web server that slow clients cannot hold."""

    _since = 0.0
    """Time since which it waits for the head of a request, or for the client to read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Starts the time limits, and makes room."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._check_time()
        # Closed ones stay in the set until the event loop has turned.
        connections: list[Any] = [each for each in self.connections if not each.transport.is_closing()]
        if len(connections) > CONNECTIONS:
            # This one is idle, too: it is closed if all others wait for their answers.
            idle = [each for each in connections if not each._answering or each.cycle.more_body]
            min(idle, key=lambda each: each._since).transport.abort()

    def on_response_complete(self) -> None:
        """Goes on to the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Waits for a client that does not read."""
        self._since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Goes on writing."""
        self._since = self.loop.time()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuses invalid HTTP, also amid a request, whose answer is then dropped."""
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_time(self) -> None:
        """Closes the connection if its client has been too slow, or checks again later."""
        if self not in self.connections:
            return
        limit = math.inf if self._answering else HEAD_SECONDS
        left = self._since + (WRITE_SECONDS if self.flow.write_paused else limit) - self.loop.time()
        if left <= 0:
            self.transport.abort()
        else:
            self.loop.call_later(min(left, HEAD_SECONDS), self._check_time)


class BusyError(Exception):
    """The queue is full; the client should try again after ``retry_after`` seconds."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class RequestQueue:
    """Encodes requests one at a time, and answers them in order of arrival, together where they fit together.

        submit -> encode (a thread) -> encoded requests -> answer (another thread)

    ``generator`` answers the oldest request and those that it takes, whose number ``on_batch`` gets; an error
    is the answer of each that is not finished. ``size`` requests may wait while others are answered.
    """

    def __init__(
        self, generator: TextGenerator, size: int, on_batch: Callable[[int], object] = lambda count: None
    ):
        self._generator, self._size, self._on_batch = generator, size, on_batch
        # Of their own, so that nothing else waits for them, and they for nothing else.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._answerer = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._requests: set[GenerationRequest] = set()
        self._encoded: deque[GenerationRequest] = deque()
        self._last_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return sum(not request.answers.running() for request in tuple(self._requests))

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises:
          BusyError: the queue is full.
        """
        waiting = self.waiting
        idle = waiting == len(self._requests)
        if waiting >= self._size + idle:
            raise BusyError(waiting, max(1, math.ceil(self._last_seconds)))
        self._requests.add(request)
        request.answers.add_done_callback(lambda _: self._requests.discard(request))
        self._encoder.submit(self._encode, request)

    def _encode(self, request: GenerationRequest) -> None:
        try:
            request.check_connected()
            prompts = request.encode(request.check_connected)
            self._generator.check(prompts, request.max_new_tokens, request.stop_tokens)
        except Exception as error:
            if request.answers.set_running_or_notify_cancel():
                request.answers.set_exception(error)
            return
        request.prompts.set_result(prompts)
        self._encoded.append(request)
        self._answerer.submit(self._answer_oldest)

    def _answer_oldest(self) -> None:
        """Runs once for each encoded request; those taken along by an earlier one are gone by then."""
        taken: list[GenerationRequest] = []

        def take(fits: Callable[[GenerationRequest], bool], most: float = math.inf) -> None:
            for request in tuple(self._encoded):
                if len(taken) < most and (request.has_left or fits(request)):
                    self._encoded.remove(request)
                    if request.answers.set_running_or_notify_cancel():
                        taken.append(request)

        take(lambda request: True, most=1)
        if not taken:
            return
        started = time.monotonic()
        error: Exception = AbandonedError()  # for a client that left as its request was taken
        try:
            self._on_batch(self._generator.answer(taken[0], take))
        except Exception as raised:
            error = raised
        for request in taken:
            if not request.answers.done():
                request.answers.set_exception(error)
        self._last_seconds = time.monotonic() - started
