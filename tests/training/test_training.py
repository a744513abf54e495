"""The training loop learns, resumes bit for bit, and stops at non-finite values."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from agentic_ring.errors import CheckpointError, NonFiniteLossError
from agentic_ring.training.losses import action_loss
from agentic_ring.training.metrics_log import read_metrics
from tests.data.synthetic import random_store
from tests.training.worker import train_tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path) -> Path:
    return random_store(tmp_path / "store.h5", [12] * 6)


def start_worker(store: Path, directory: Path, **options) -> subprocess.Popen:
    """A worker process; upper-case options are environment variables, the others flags."""
    directory.mkdir(exist_ok=True)
    environment = os.environ | {name: str(value) for name, value in options.items() if name.isupper()}
    command = [sys.executable, "-m", "tests.training.worker", "--store", store, "--directory", directory]
    flags = {name: value for name, value in options.items() if not name.isupper()}
    command += [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(worker: subprocess.Popen) -> None:
    _, errors = worker.communicate(timeout=300)
    assert worker.returncode == 0, errors


def losses(directory: Path) -> list[float]:
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(store, tmp_path):
    steps = 30
    undisturbed = train_tiny(store, tmp_path / "undisturbed", steps)
    killed = tmp_path / "killed"
    worker = start_worker(store, killed, steps=steps)
    metrics = killed / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 7:
        assert worker.poll() is None, worker.communicate()
        time.sleep(0.01)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert metrics.read_text().count("\n") < steps, "the kill came too late to prove anything"
    resumed = train_tiny(store, killed, steps)
    np.testing.assert_array_equal(resumed, undisturbed)
    assert losses(killed) == losses(tmp_path / "undisturbed")


@pytest.mark.slow
def test_two_processes_train_the_same_weights_as_one(store, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    one, two = tmp_path / "one", tmp_path / "two"
    finish(start_worker(store, one, steps=3, data=2))
    workers = [
        start_worker(
            store,
            two,
            steps=3,
            data=2,
            devices=4,
            distributed=True,
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES=2,
            JAX_PROCESS_ID=number,
        )
        for number in range(2)
    ]
    for worker in workers:
        finish(worker)
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)
    weights = np.load(two / "weights-0.npy")
    np.testing.assert_array_equal(weights, np.load(two / "weights-1.npy"))
    np.testing.assert_allclose(weights, np.load(one / "weights-0.npy"), atol=1e-5)


def test_it_learns(store, tmp_path):
    train_tiny(store, tmp_path / "run", steps=40)
    measured = losses(tmp_path / "run")
    assert np.mean(measured[-5:]) < 0.8 * np.mean(measured[:5])


def test_a_non_finite_gradient_stops_the_run_before_a_checkpoint(store, tmp_path):
    def cusp(model, steps):
        """A loss with a finite value and an infinite slope at 0."""
        weights = jax.tree.leaves(nnx.state(model, nnx.Param))
        return action_loss(model, steps) + jnp.sqrt(0.0 * weights[0].sum())

    with pytest.raises(NonFiniteLossError, match="the gradient norm is nan at step 1; there is no"):
        train_tiny(store, tmp_path / "run", steps=2, checkpoint_every=1, loss=cusp)


def test_a_non_finite_loss_stops_the_run(store, tmp_path):
    message = r"the loss is (nan|inf) at step \d+; the last good checkpoint is step \d+"
    with pytest.raises(NonFiniteLossError, match=message):
        train_tiny(store, tmp_path / "run", steps=400, learning_rate=1e30)


def test_a_damaged_checkpoint_is_named(store, tmp_path):
    run = tmp_path / "run"
    train_tiny(store, run, steps=2)
    step = next(path for path in (run / "checkpoints").iterdir() if path.is_dir())
    shutil.rmtree(step / "state")
    with pytest.raises(CheckpointError, match=r"checkpoint 2 in .* cannot be read"):
        train_tiny(store, run, steps=4)
