"""A stopped run saves its last step, exits with 75 and ends with the weights of an undisturbed one."""

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from agentic_ring.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from agentic_ring.training.metrics_log import read_metrics
from tests.training.worker import train_tiny
from tests.training.worker_processes import finish, messages, start_job, start_worker

STEPS = 200
FAR = {"steps": STEPS, "checkpoint_every": 10_000}
"""A run whose only regular checkpoint is its last."""


def wait_for_rows(directory: Path, count: int, worker: subprocess.Popen) -> None:
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        assert worker.poll() is None, worker.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def measured(directory: Path) -> list[dict[str, float]]:
    """Everything in the log except for speed."""
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [{name: row[name] for name in ("loss", "gradient_norm", "learning_rate")} for row in rows]


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())


@pytest.mark.slow
@pytest.mark.parametrize("request_to_stop", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_the_last_step_and_the_run_resumes_bit_for_bit(store, tmp_path, request_to_stop):
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    finish(start_worker(store, undisturbed, **FAR))
    worker = start_worker(store, stopped, **FAR)
    wait_for_rows(stopped, 20, worker)
    worker.send_signal(request_to_stop)
    if request_to_stop != signal.SIGINT:  # some schedulers send it twice
        worker.send_signal(request_to_stop)
    _, printed = worker.communicate(timeout=60)
    assert worker.returncode == EXIT_STOPPED, printed
    rows = len(measured(stopped))
    assert rows < STEPS, "the signal came too late to prove anything"
    assert messages(printed) == [
        f"stopped by {request_to_stop.name}, saved at step {rows} of {STEPS}; "
        "run the same command again to continue"
    ]
    assert saved_steps(stopped) == [rows]
    finish(start_worker(store, stopped, **FAR))
    np.testing.assert_array_equal(np.load(stopped / "weights-0.npy"), np.load(undisturbed / "weights-0.npy"))
    assert measured(stopped) == measured(undisturbed)
    assert best_losses(stopped) == best_losses(undisturbed)


def best_losses(directory: Path) -> dict[int, float]:
    """The losses by which the best checkpoint is selected, by step."""
    files = (directory / "checkpoints").glob("*/loss.json")
    return {int(file.parent.name): json.loads(file.read_text())["loss"] for file in files}


@pytest.mark.slow
def test_one_signalled_process_stops_all_after_the_same_step(store, tmp_path):
    processes = 2
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    options = {**FAR, "steps": 40, "data": 2, "devices": 8 // processes}
    finish(*start_job(store, undisturbed, processes, **options))
    workers = start_job(store, stopped, processes, **options)
    wait_for_rows(stopped, 5, workers[0])
    workers[-1].send_signal(signal.SIGTERM)
    time.sleep(0.05)
    workers[0].send_signal(signal.SIGTERM)
    printed = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [EXIT_STOPPED] * processes, printed
    rows = len(measured(stopped))
    saved = f"saved at step {rows} of {options['steps']}; run the same command again to continue"
    by_signal, by_another = f"stopped by SIGTERM, {saved}", f"stopped by another process, {saved}"
    first, *others, last = map(messages, printed)
    assert first in ([by_signal], [by_another])  # its own signal may come after the decision
    assert others == [[by_another]] * (processes - 2)
    assert last == [by_signal]
    assert rows < options["steps"], "the signal came too late to prove anything"
    finish(*start_job(store, stopped, processes, **options))
    np.testing.assert_array_equal(np.load(stopped / "weights-1.npy"), np.load(undisturbed / "weights-1.npy"))
    assert measured(stopped) == measured(undisturbed)


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(store, tmp_path):
    worker = start_worker(store, tmp_path / "run", **FAR)
    wait_for_rows(tmp_path / "run", 1, worker)
    worker.send_signal(signal.SIGSTOP)  # both interrupts arrive before anything can answer the first
    worker.send_signal(signal.SIGINT)
    worker.send_signal(signal.SIGCONT)
    time.sleep(0.005)
    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=20)
    assert worker.returncode == EXIT_INTERRUPTED


def test_checkpoints_by_time_change_neither_weights_nor_the_best_checkpoint(store, tmp_path):
    by_step, by_time = tmp_path / "by_step", tmp_path / "by_time"
    expected = train_tiny(store, by_step, 12, checkpoint_every=4)
    np.testing.assert_array_equal(
        train_tiny(store, by_time, 12, checkpoint_every=4, checkpoint_minutes=1e-9), expected
    )
    assert measured(by_time) == measured(by_step)
    assert saved_steps(by_time) == saved_steps(by_step)
    assert best_losses(by_time) == best_losses(by_step)
    # The log's losses that a regular checkpoint averages are those since the one before.
    for step, loss in best_losses(by_step).items():
        logged = [row["loss"] for row in measured(by_step)[step - 4 : step]]
        np.testing.assert_allclose(loss, np.mean(logged), rtol=1e-12)
