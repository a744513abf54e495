"""Two processes train the same weights as one; where one is lost or hangs, the other ends soon."""

import re
import signal
import time

import jax
import numpy as np
import pytest

from agentic_ring.errors import EXIT_PROCESS_LOST
from tests.training.worker import train_tiny
from tests.training.worker_processes import await_rows, ended, losses, started_job

pytestmark = pytest.mark.slow
ENDLESS = {"data": 2, "steps": 100_000}


def test_processes_train_the_same_weights_as_one_in_whatever_order_the_ring_visits_them(store, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    expected = train_tiny(store, one, steps=3, devices=jax.devices()[:4])
    with started_job(store, many, steps=3, order="0110") as job:
        assert [ended(worker)[0] for worker in job] == [0, 0]
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-5)
    weights = [np.load(many / f"weights-{number}.npy") for number in (0, 1)]
    np.testing.assert_array_equal(*weights)
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_other_says_that_a_process_was_lost_and_ends(store, tmp_path, victim, number):
    with started_job(store, tmp_path, **ENDLESS, heartbeat=10, PYTHONFAULTHANDLER=1) as job:
        await_rows(tmp_path, 4, *job)
        job[victim].send_signal(number)
        lost = time.monotonic()
        _, errors = job[1 - victim].communicate(timeout=400)
        assert time.monotonic() - lost < 120
    # By ours after a failed collective, or by JAX's abort.
    assert job[1 - victim].returncode in (EXIT_PROCESS_LOST, -signal.SIGABRT), errors
    assert re.search(r"another process of the job was lost|another task died|heartbeat", errors), errors


def test_a_job_whose_steps_hang_ends(store, tmp_path):
    """The heartbeats go on, and the other process waits in a collective."""
    with started_job(store, tmp_path, **ENDLESS, hang=6, AGENTIC_RING_HANG_SECONDS=3) as job:
        outputs = [ended(worker) for worker in job]
    assert EXIT_PROCESS_LOST in [status for status, _ in outputs], outputs
    assert all(status in (EXIT_PROCESS_LOST, -signal.SIGABRT) for status, _ in outputs), outputs
    assert any("no training step has ended" in line for _, lines in outputs for line in lines), outputs


def test_where_the_first_process_fails_the_others_say_so(store, tmp_path):
    with started_job(store, tmp_path, steps=2, fail=True) as job:
        assert ended(job[0]) == (1, ["error: there is no data"])
        assert ended(job[1]) == (1, ["error: process 0 failed in stage 'data'; its output says why"])
