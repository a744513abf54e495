"""The training loop learns, resumes bit for bit, and stops at non-finite values."""

import shutil
import signal
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from agentic_ring.errors import CheckpointError, NonFiniteLossError
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import run_updates
from agentic_ring.training.losses import action_loss
from agentic_ring.training.metrics_log import MetricsLog, read_metrics
from agentic_ring.training.train_config import TrainConfig
from agentic_ring.training.train_step import TrainState
from tests.training.worker import train_tiny
from tests.training.worker_processes import losses, start_worker


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


def test_it_learns(store, tmp_path):
    train_tiny(store, tmp_path / "run", steps=40, checkpoint_every=40)
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
    with pytest.raises(CheckpointError, match=r"2/state/.* is damaged: it is missing"):
        train_tiny(store, run, steps=4)


class Recorder:
    """A metric that records when the loop waits for it."""

    def __init__(self, step: int, events: list[tuple[str, int]]):
        self._step, self._events = step, events

    def __float__(self) -> float:
        self._events.append(("fetched", self._step))
        return 1.0


class Numbers:
    """Batches 1, 2, ..."""

    def __init__(self, events: list[tuple[str, int]]):
        self._events, self.number = events, 0

    def __next__(self) -> int:
        self.number += 1
        self._events.append(("placed", self.number))
        return self.number

    def get_state(self) -> dict[str, int]:
        return {"number": self.number}

    def set_state(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def events_of(directory, config: TrainConfig, measure=None) -> list[tuple[str, int]]:
    """Trains a state that only counts its steps; returns what the loop did in which order."""
    events: list[tuple[str, int]] = []

    def update(state: TrainState, batch: int) -> tuple[TrainState, dict[str, Any]]:
        events.append(("dispatched", batch))
        return replace(state, step=state.step + 1), {"loss": Recorder(batch, events)}

    first = TrainState(jnp.zeros((), jnp.int32), {"weight": jnp.zeros(2)}, ())
    with closing(Checkpoints(directory / "checkpoints")) as checkpoints:
        last = checkpoints.last_step or 0
        with closing(MetricsLog(directory / "metrics.jsonl", last)) as metrics:
            run_updates(
                config,
                update,
                lambda: first,
                lambda: first,
                Numbers(events),
                checkpoints,
                metrics,
                learning_rate=lambda step: 0.1,
                tokens=lambda batch: 1,
                measure=measure,
            )
    return events


def test_the_next_batch_is_placed_before_the_metrics_of_a_step_are_fetched(tmp_path):
    events = events_of(tmp_path, TrainConfig(steps=4, batch_size=1, checkpoint_every=3))
    # Only a checkpoint, after steps 3 and 4, waits for the metrics of its own step.
    expected = (
        "placed 1, dispatched 1, placed 2, dispatched 2, fetched 1, placed 3, dispatched 3, fetched 2, "
    )
    expected += "fetched 3, placed 4, dispatched 4, fetched 4"
    assert ", ".join(f"{event} {step}" for event, step in events) == expected


def test_a_run_that_was_killed_after_a_measurement_measures_again_and_loses_none(tmp_path):
    config = TrainConfig(steps=6, batch_size=1, checkpoint_every=2, log_every=4)
    measured: list[int] = []

    def measure(state: TrainState) -> dict[str, float]:
        measured.append(int(state.step))
        if measured == [2, 4]:
            raise KeyboardInterrupt
        return {"return": 10.0 * int(state.step)}

    with pytest.raises(KeyboardInterrupt):
        events_of(tmp_path, config, measure)
    events_of(tmp_path, config, measure)
    assert measured == [2, 4, 4], "the end of the training is measured by whoever asked for it"
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("return")) for row in rows] == [(2, 20.0), (4, 40.0), (6, None)]
