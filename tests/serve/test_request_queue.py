"""Waiting requests, and the place in the queue that a cancelled one frees."""

import asyncio
import threading
from functools import partial

import pytest

from agentic_ring.serve.request_queue import BusyError, RequestQueue


def test_cancelling_a_waiting_request_frees_its_place_at_once():
    finish = threading.Event()

    def work(request, take, done):
        assert finish.wait(30)
        done(request, request)

    async def scenario() -> list[int]:
        queue = RequestQueue(1, work)
        running = queue.submit(lambda: 1)
        while queue.waiting:
            await asyncio.sleep(0.01)
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


def test_the_oldest_takes_along_what_fits_and_each_is_finished_on_its_own():
    worked, go_on = [], threading.Event()

    def work(request, take, finish):
        assert go_on.wait(30)
        others = take(lambda other: other % 2 == request % 2)
        worked.append([request, *others])
        for each in (*others, request):
            finish(each, 10 * each)

    async def scenario() -> list[int]:
        queue = RequestQueue(8, work)
        tasks = [queue.submit(lambda number=number: number) for number in range(1, 7)]
        while len(queue._prepared) < 5:
            await asyncio.sleep(0.01)
        go_on.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(scenario()) == [10, 20, 30, 40, 50, 60]
    assert worked == [[1, 3, 5], [2, 4, 6]]


def test_an_error_is_the_result_of_all_that_are_not_finished_and_of_no_others():
    def work(request, take, finish):
        take(lambda other: other < 3)
        finish(request, "done")
        if request == 1:
            raise ValueError("broken")

    def prepare(number):
        if number == 4:
            raise KeyError(number)
        return number

    async def scenario() -> list:
        queue = RequestQueue(8, work)
        tasks = [queue.submit(partial(prepare, number)) for number in range(1, 6)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third, fourth, fifth = asyncio.run(scenario())
    assert (first, third, fifth) == ("done", "done", "done")
    assert second == "done" or str(second) == "broken"
    assert isinstance(fourth, KeyError)
