"""A run that is stopped, killed or moved ends with the weights of an undisturbed one; so do two processes."""

import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED
from agentic_ring.training.loop import MetricsLog
from tests.data.synthetic import random_store
from tests.training.worker import await_rows, ended, losses, measured, start_worker, started_job, train_tiny

pytestmark = pytest.mark.slow
STEPS = 60
ENDLESS = {"data": 2, "steps": 100_000}


@pytest.fixture
def store(tmp_path) -> Path:
    return random_store(tmp_path / "store.h5", [12] * 6)


def test_a_run_that_is_stopped_twice_and_killed_resumes_bit_for_bit(store, tmp_path):
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    far = {"steps": STEPS, "checkpoint_every": 10_000}  # the only regular checkpoint is the last
    expected = train_tiny(store, whole, **far, devices=jax.devices()[:2])
    loss, rate = (np.array([row[name] for row in measured(whole)]) for name in ("loss", "learning_rate"))
    assert loss[-5:].mean() < 0.8 * loss[:5].mean()
    np.testing.assert_allclose(rate[:3], [1e-2 / 3, 2e-2 / 3, 1e-2], rtol=1e-5)
    rows = 0
    for number in (signal.SIGUSR1, signal.SIGINT):
        worker = start_worker(store, disturbed, **far, devices=2)
        await_rows(disturbed, rows + 10, worker)
        worker.send_signal(number)
        if number != signal.SIGINT:  # some schedulers send it twice
            worker.send_signal(number)
        status, said = ended(worker)
        assert status == EXIT_STOPPED, said
        rows = len(measured(disturbed))
        assert rows < STEPS, "the signal came too late to prove anything"
        saved = f"saved at step {rows} of {STEPS}; run the same command again to continue"
        assert said[-1] == f"stopped by {number.name}, {saved}"
        assert len(said) == 1 or "resuming" in said[0]
        assert [path.name for path in (disturbed / "checkpoints").iterdir()] == [str(rows)]
    worker = start_worker(store, disturbed, **far, devices=2, checkpoint_minutes=1e-9)
    await_rows(disturbed, rows + 10, worker)
    worker.kill()
    worker.communicate()
    assert len(losses(disturbed)) < STEPS, "the kill came too late to prove anything"
    np.testing.assert_array_equal(train_tiny(store, disturbed, **far, devices=jax.devices()[:2]), expected)
    assert measured(disturbed) == measured(whole)
    selected = [(run / f"checkpoints/{STEPS}/loss.json").read_text() for run in (disturbed, whole)]
    assert selected[0] == selected[1]


def test_a_run_moves_from_ring_4_to_two_of_2_and_to_one_device(store, tmp_path, monkeypatch, capsys):
    steps, four = 6, {"devices": jax.devices()[:4]}
    expected = train_tiny(store, tmp_path / "undisturbed", steps, **four)
    write, moved = MetricsLog.write, tmp_path / "moved"

    def train_until(last: int, **hardware) -> None:
        def stop(self, step, values):
            write(self, step, values)
            if step == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(MetricsLog, "write", stop)
            train_tiny(store, moved, steps, **hardware)

    train_until(3, **four)
    train_until(5, data=2, **four)
    weights = train_tiny(store, moved, steps, devices=jax.devices()[7:])
    printed = capsys.readouterr().err
    assert [f"resuming from step {step} of 6" in printed for step in (2, 4)] == [True] * 2
    np.testing.assert_allclose(losses(moved), losses(tmp_path / "undisturbed"), rtol=1e-5)
    np.testing.assert_allclose(weights, expected, atol=1e-5)


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
