"""A run that is stopped, killed or moved to other devices ends with the weights of an undisturbed one."""

import signal

import jax
import numpy as np
import pytest

from agentic_ring.errors import EXIT_STOPPED
from agentic_ring.training.loop import MetricsLog
from tests.training.worker import train_tiny
from tests.training.worker_processes import await_rows, losses, measured, messages, start_worker

pytestmark = pytest.mark.slow
STEPS = 60


class Interruption(Exception):
    """Ends a session of training in the middle."""


def test_a_run_that_is_stopped_twice_and_killed_resumes_bit_for_bit(store, tmp_path):
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    far = {"steps": STEPS, "checkpoint_every": 10_000}  # the only regular checkpoint is the last
    expected = train_tiny(store, whole, **far)
    rows = 0
    for number in (signal.SIGUSR1, signal.SIGINT):
        worker = start_worker(store, disturbed, **far)
        await_rows(disturbed, rows + 10, worker)
        worker.send_signal(number)
        if number != signal.SIGINT:  # some schedulers send it twice
            worker.send_signal(number)
        _, printed = worker.communicate(timeout=60)
        assert worker.returncode == EXIT_STOPPED, printed
        rows = len(measured(disturbed))
        assert rows < STEPS, "the signal came too late to prove anything"
        saved = f"saved at step {rows} of {STEPS}; run the same command again to continue"
        assert [line for line in messages(printed) if "resuming" not in line] == [
            f"stopped by {number.name}, {saved}"
        ]
        assert [path.name for path in (disturbed / "checkpoints").iterdir()] == [str(rows)]
    worker = start_worker(store, disturbed, **far, checkpoint_minutes=1e-9)
    await_rows(disturbed, rows + 10, worker)
    worker.kill()
    worker.communicate()
    assert len(losses(disturbed)) < STEPS, "the kill came too late to prove anything"
    np.testing.assert_array_equal(train_tiny(store, disturbed, **far), expected)
    assert measured(disturbed) == measured(whole)
    selected = [(run / f"checkpoints/{STEPS}/loss.json").read_text() for run in (disturbed, whole)]
    assert selected[0] == selected[1]


def test_a_run_moves_from_ring_8_to_two_of_4_and_to_one_device(store, tmp_path, monkeypatch, capsys):
    steps = 6
    expected = train_tiny(store, tmp_path / "undisturbed", steps)
    write, moved = MetricsLog.write, tmp_path / "moved"

    def train_until(last: int, **hardware) -> None:
        def stop(self, step, values):
            write(self, step, values)
            if step == last:
                raise Interruption

        with monkeypatch.context() as patch, pytest.raises(Interruption):
            patch.setattr(MetricsLog, "write", stop)
            train_tiny(store, moved, steps, **hardware)

    train_until(3)
    train_until(5, data=2)
    weights = train_tiny(store, moved, steps, devices=jax.devices()[7:])
    printed = capsys.readouterr().err
    assert [f"resuming from step {step} of 6" in printed for step in (2, 4)] == [True] * 2
    np.testing.assert_allclose(losses(moved), losses(tmp_path / "undisturbed"), rtol=1e-5)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
