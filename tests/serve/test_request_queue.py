"""Waiting requests, and the place in the queue that a cancelled one frees."""

import asyncio
import threading

import pytest

from agentic_ring.serve.request_queue import BusyError, RequestQueue


def test_cancelling_a_waiting_request_frees_its_place_at_once():
    async def scenario() -> list[int]:
        queue, finish = RequestQueue(1), threading.Event()
        running = queue.submit(lambda: finish.wait(30) and 1)
        waiting = queue.submit(lambda: 2)
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            queue.submit(lambda: 3)
        queue.cancel(waiting)
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        queue.cancel(running)  # already running: its thread cannot be stopped from outside
        late = queue.submit(lambda: 3)
        finish.set()
        return [await running, await late]

    assert asyncio.run(scenario()) == [1, 3]
