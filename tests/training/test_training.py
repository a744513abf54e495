"""The training loop saves and logs what it should, and stops at a value that is not finite."""

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.errors import DataError, NonFiniteLossError
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog, read_metrics, run_updates
from agentic_ring.training.optimizer import TrainConfig
from agentic_ring.training.train_step import TrainState
from tests.training.worker import measured


class Numbers:
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


@partial(jax.jit, donate_argnums=0)
def add(state: TrainState, number: int) -> TrainState:
    return replace(state, step=state.step + 1, params={"weight": 0.5 * state.params["weight"] + number})


def first() -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), {"weight": jnp.zeros(2)}, ())


def events_of(
    directory: Path,
    config: TrainConfig,
    measure: Callable[[TrainState], dict[str, float]] | None = None,
    loss: Callable[[int], float] = lambda step: 1.0,
    gradient_norm: Callable[[int], float] = lambda step: 1.0,
) -> list[tuple[str, int]]:
    """Trains a state that only sums numbers; returns what the loop did in which order."""
    events: list[tuple[str, int]] = []

    @dataclass
    class Recorder:
        """A loss that records when the loop waits for it."""

        step: int

        def __float__(self) -> float:
            events.append(("fetched", self.step))
            return loss(self.step)

    def update(state: TrainState, batch: int) -> tuple[TrainState, dict[str, Any]]:
        events.append(("dispatched", batch))
        return add(state, batch), {"gradient_norm": gradient_norm(batch), "loss": Recorder(batch)}

    with closing(Checkpoints(directory / "checkpoints")) as checkpoints:
        last = checkpoints.last_step or 0
        with closing(MetricsLog(directory / "metrics.jsonl", last)) as metrics:
            figures: Any = {"learning_rate": lambda step: 0.1 * step, "tokens": lambda batch: 1000}
            written = checkpoints, metrics
            run_updates(config, update, first, first, Numbers(events), *written, **figures, measure=measure)
    return events


def test_the_next_batch_is_placed_before_the_metrics_of_a_step_are_fetched(tmp_path):
    begin = time.monotonic()
    events = events_of(tmp_path, TrainConfig(steps=4, batch_size=1, checkpoint_every=3))
    rates = [row["tokens_per_second"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert 0 < sum(1000 / rate for rate in rates) < time.monotonic() - begin
    # Only a checkpoint, after steps 3 and 4, waits for the metrics of its own step.
    expected = "placed 1, dispatched 1, placed 2, dispatched 2, fetched 1, placed 3, dispatched 3, fetched 2"
    expected += ", fetched 3, placed 4, dispatched 4, fetched 4"
    assert ", ".join(f"{event} {step}" for event, step in events) == expected


def test_a_run_that_was_killed_after_a_measurement_measures_again_and_loses_none(tmp_path):
    config = TrainConfig(steps=6, batch_size=1, checkpoint_every=2, log_every=4)
    steps: list[int] = []

    def measure(state: TrainState) -> dict[str, float]:
        steps.append(int(state.step))
        if steps == [2, 4]:
            raise KeyboardInterrupt
        return {"return": 10.0 * int(state.step)}

    with pytest.raises(KeyboardInterrupt):
        events_of(tmp_path, config, measure)
    events_of(tmp_path, config, measure)
    assert steps == [2, 4, 4], "the end of the training is measured by whoever asked for it"
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("return")) for row in rows] == [(2, 20.0), (4, 40.0), (6, None)]
    np.testing.assert_allclose([row["learning_rate"] for row in rows], [0.2, 0.4, 0.6])


def saved(directory: Path) -> Iterator[tuple[int, float, dict[str, Any], np.ndarray]]:
    """Step, loss, state of the batches and weights of each checkpoint."""
    checkpoints = Checkpoints(directory / "checkpoints")
    for step in sorted(int(path.name) for path in (directory / "checkpoints").iterdir()):
        state, data = checkpoints.restore(step, first())
        loss = json.loads((directory / f"checkpoints/{step}/loss.json").read_text())["loss"]
        yield step, loss, data, np.asarray(state.params["weight"])
    checkpoints.close()


def test_checkpoints_by_time_change_neither_weights_nor_the_best_checkpoint(tmp_path):
    by_step, by_time = tmp_path / "by_step", tmp_path / "by_time"
    config = TrainConfig(steps=12, batch_size=1, checkpoint_every=4)
    events_of(by_step, config, loss=lambda step: (step - 7.0) ** 2)
    events_of(by_time, replace(config, checkpoint_minutes=1e-9), loss=lambda step: (step - 7.0) ** 2)
    assert measured(by_time) == measured(by_step)
    for timed, regular in zip(saved(by_time), saved(by_step), strict=True):
        np.testing.assert_equal(timed, regular)
    # The best, and the last one; each with the mean loss since the regular one before.
    assert [(step, loss) for step, loss, *_ in saved(by_step)] == [(8, 1.5), (12, 13.5)]


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_a_value_that_is_not_finite_stops_the_run_before_a_checkpoint(tmp_path, name):
    config = TrainConfig(steps=6, batch_size=1, checkpoint_every=1)
    for step, last in ((1, "there is no"), (3, "the last good checkpoint is step 2")):
        with pytest.raises(NonFiniteLossError, match=f"the {name[:4]}.* is inf at step {step}; {last}"):
            events_of(tmp_path, config, **{name: lambda at, step=step: 1.0 if at < step else np.inf})


def write(path, resume_step, rows, **options):
    with closing(MetricsLog(path, resume_step, **options)) as log:
        for step, loss in rows:
            log.write(step, {"loss": loss})


def test_a_resumed_run_repeats_no_row_and_an_incomplete_last_line_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [(1, 0.5), (2, 0.4), (3, 0.3)])
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    write(path, 2, [(3, 0.31), (4, 0.2)])
    expected = [(1, 0.5), (2, 0.4), (3, 0.31), (4, 0.2)]
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == expected


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in ("nonsense", '{"step": 1}', '{"step": 1.5}', "{}"):
        path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
        with pytest.raises(DataError, match=r"line 2 (is not JSON .*nonsense|has step )"):
            read_metrics(path)


def test_wandb_runs_offline_without_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    write(tmp_path / "metrics.jsonl", 0, [(1, 0.5)], wandb_project="test", config={"seed": 1})
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's always-full device")
def test_a_full_disk_names_the_metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log._file.close()
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    log._file = io.TextIOWrapper(full, write_through=True)
    with pytest.raises(OSError, match="No space left") as caught:
        log.write(1, {"loss": 0.5})
    assert caught.value.filename == str(path)
    log.close()
