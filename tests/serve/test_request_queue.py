"""Who waits for his turn, and what becomes of his place when he leaves."""

import asyncio
import threading

import pytest

from agentic_ring.serve.request_queue import BusyError, Turns


def test_who_leaves_while_he_waits_frees_his_place_at_once():
    async def scenario() -> list[int]:
        turns, finish = Turns(places=1), threading.Event()
        running = turns.start(lambda: finish.wait(30) and 1)
        waiting = turns.start(lambda: 2)
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            turns.start(lambda: 3)
        turns.leave(waiting)
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        turns.leave(running)  # it is under way: its thread cannot be stopped from outside
        late = turns.start(lambda: 3)
        finish.set()
        return [await running, await late]

    assert asyncio.run(scenario()) == [1, 3]
