"""The training loop: resuming, updates, the log of metrics, checkpoints, and the end of a job on request."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.distributed import compile_together, watched_steps
from agentic_ring.errors import DataError, NonFiniteLossError, StopRequested
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_row, read_json_rows
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.model import Model, Params
from agentic_ring.stopping import deferred
from agentic_ring.terminal.progress import progress, say
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.optimizer import TrainConfig, learning_rate_schedule, make_optimizer
from agentic_ring.training.train_step import Loss, TrainState, abstract_state, init_state, make_train_step

Measure = Callable[[TrainState], dict[str, float]]
"""Returns further metrics of a state that is being trained."""
_REMEDY = "remove that line, or move the file aside"


class Batches(Protocol):
    """An endless iterator of batches on the devices, each with a ``weight``."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """The state of the iterator, as data that fits JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state that ``get_state`` returned."""


class MetricsLog:
    """Writes one JSON object per step on process 0, after those up to ``resume_step``; nothing on others.

    With ``wandb_project`` it logs to Weights & Biases as well, which shows ``config``; offline unless an API
    key is set (``wandb sync`` uploads later).
    """

    def __init__(
        self,
        path: Path,
        resume_step: int,
        wandb_project: str | None = None,
        config: dict[str, Any] | None = None,
    ):
        self._path, self._file, self._wandb = path, None, None
        if jax.process_index() != 0:
            return
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step] if path.exists() else []
        with replacing(path) as beside:
            beside.write_text("".join(map(json_row, kept)))
        self._file = path.open("a")
        if wandb_project is not None:
            with needs_extra("scripts"):
                import wandb  # slow to import, and only needed here

            mode = None if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") else "offline"
            self._wandb = wandb.init(
                project=wandb_project, name=path.parent.name, dir=path.parent, config=config, mode=mode
            )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one row and flushes it to the file."""
        if self._file is not None:
            with self._named_errors():
                self._file.write(json_row({"step": step, **values}))
                self._file.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Closes the log."""
        if self._file is not None:
            with self._named_errors():
                self._file.close()
        if self._wandb is not None:
            self._wandb.finish()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Adds the file's name to the error of a failed write, such as on a full disk."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a metrics file, see ``read_json_rows``; each has a step of its own."""
    rows = read_json_rows(path, dict[str, int | float], _REMEDY)
    last = -1
    for number, row in enumerate(rows, start=1):
        step = row.get("step")
        if not isinstance(step, int) or step <= last:
            raise DataError(f"{path}, line {number} has step {step}, expected more than {last}; {_REMEDY}")
        last = step
    return rows


def train(
    config: TrainConfig,
    model: Model,
    loss_function: Loss,
    batches: Batches,
    mesh: Mesh,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
    *,
    tokens_per_place: int = 1,
    rules: ShardingRules = ShardingRules(),
    start: Callable[[], Params] | None = None,
    frozen: Params | None = None,
    measure: Measure | None = None,
) -> TrainState:
    """Trains a model until ``config.steps`` updates are done, resuming from the newest checkpoint.

    Args:
      loss_function: one of ``training.train_step``.
      tokens_per_place: tokens per element of a batch's weight, for the reported speed only.
      start: creates the initial parameters of a new run; None draws them from the seed.
      frozen: weights of the model that are not trained, if any.
      measure: as in ``run_updates``.

    Raises:
      NonFiniteLossError: a loss or gradient is not finite; names the step and the last good checkpoint.
      CheckpointError: the newest checkpoint cannot be read.
      StopRequested: some process of the job received a signal; the last step is saved.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    learning_rate: Any = learning_rate_schedule(config.optimizer, config.steps)
    step = make_train_step(model, loss_function, optimizer, config.optimizer.accumulation)
    train_step = compile_together(jax.jit(step, donate_argnames="state"))
    with jax.set_mesh(mesh):
        return run_updates(
            config,
            lambda state, batch: train_step(state, batch, frozen),
            lambda: init_state(model, optimizer, config.seed, mesh, rules, start() if start else None),
            lambda: abstract_state(model, optimizer, mesh, rules),
            batches,
            checkpoints,
            metrics,
            learning_rate=lambda step: float(learning_rate(step - 1)),
            tokens=lambda batch: batch.weight.size * tokens_per_place,
            measure=measure,
        )


def run_updates(
    config: TrainConfig,
    update: Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]],
    fresh: Callable[[], TrainState],
    like: Callable[[], TrainState],
    batches: Batches,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
    *,
    learning_rate: Callable[[int], float],
    tokens: Callable[[Any], int],
    measure: Measure | None = None,
) -> TrainState:
    """Runs updates of any learning algorithm until ``config.steps``, resuming from the newest checkpoint.

    Args:
      config: length and settings; the optimiser in it is not used here.
      update: applies one update and returns its metrics, including ``loss``; may donate the state.
      like: returns shapes and shardings of the state, for restoring a checkpoint.
      learning_rate: learning rate of an update, counted from 1.
      tokens: number of tokens in a batch, for the reported speed.
      measure: returns further metrics of the state, such as its return in the environment. It is called
        before each regular checkpoint but the last, and a run that was killed between both calls it again.

    Metrics are fetched one step late: the next batch is placed and the next update dispatched while the
    devices still compute. A checkpoint waits for the metrics of its own step.

    Raises:
      NonFiniteLossError, CheckpointError, StopRequested: as in ``train``.
    """
    # Mean loss since the last regular checkpoint: that of one batch is too noisy to select the best.
    losses = {"total": 0.0, "count": 0}
    if checkpoints.last_step is None:
        state = fresh()
    else:
        state, saved = checkpoints.restore(checkpoints.last_step, like())
        losses |= saved.pop("losses", {})
        batches.set_state(saved)
        say(f"resuming from step {checkpoints.last_step} of {config.steps}")
    first = int(state.step)
    saved_at = clock = time.monotonic()
    previous: _Dispatched | None = None
    with (
        progress("training", config.steps, finished=first) as advance,
        deferred() as stop_requested,
        watched_steps() as enter_step,
    ):

        def finish(sent: _Dispatched, reached: TrainState | None = None) -> np.ndarray:
            """Waits for a step, measures the state reached if given, logs, and returns the job's wishes."""
            nonlocal clock
            values = _finite_values(sent, checkpoints)
            losses["total"] += values["loss"]
            losses["count"] += 1
            now = time.monotonic()
            tokens_per_second = sent.tokens / (now - clock)
            further = {} if measure is None or reached is None else measure(reached)
            if further or sent.step % config.log_every == 0 or sent.step == config.steps:
                rates = {"learning_rate": learning_rate(sent.step), "tokens_per_second": tokens_per_second}
                metrics.write(sent.step, values | rates | further)
            speed = f"{tokens_per_second:,.0f} tokens/s"
            advance(sent.step, speed, loss=values["loss"], last_return=further.get("return"))
            clock = now if reached is None else time.monotonic()  # the speed is that of training alone
            return np.asarray(sent.wishes, bool)

        for step in range(first + 1, config.steps + 1):
            batch = next(batches)
            enter_step()
            state, measured = update(state, batch)
            overdue = time.monotonic() - saved_at >= 60 * config.checkpoint_minutes
            own = np.array([overdue and jax.process_index() == 0, stop_requested() is not None])
            state, asked = _combine_wishes(state, own)
            current = _Dispatched(step, measured, asked, tokens(batch))
            wishes = np.zeros(2, bool) if previous is None else finish(previous)
            previous = current
            regular = step % config.checkpoint_every == 0 or step == config.steps
            if not (regular or wishes.any()):
                continue
            _, stop = wishes | finish(current, state if regular and step < config.steps else None)
            previous = mean = None
            # A checkpoint at a moment that a clock or a signal chose does not compete for the best one.
            if regular:
                mean = losses["total"] / losses["count"]
                losses = {"total": 0.0, "count": 0}
            checkpoints.save(step, state, batches.get_state() | {"losses": dict(losses)}, mean)
            saved_at = time.monotonic()
            if stop:
                checkpoints.wait()
                signal = stop_requested() or "another process"
                raise StopRequested(f"stopped by {signal}, saved at step {step} of {config.steps}")
    return state


class _Dispatched(NamedTuple):
    """A step that the devices may still compute."""

    step: int
    measured: dict[str, Any]
    wishes: Any  # bool or int32 [2], see ``_combine_wishes``
    tokens: int


def _finite_values(sent: _Dispatched, checkpoints: Checkpoints) -> dict[str, float]:
    """Waits for the metrics of a step; the loss comes first."""
    values = {name: float(sent.measured[name]) for name in {"loss": None, **sent.measured}}
    # A gradient may overflow although the loss is finite, and would corrupt the next checkpoint.
    for name, value in values.items():
        if not math.isfinite(value):
            last = checkpoints.last_step
            back = f"the last good checkpoint is step {last}" if last else "there is no checkpoint yet"
            raise NonFiniteLossError(
                f"the {name.replace('_', ' ')} is {value} at step {sent.step}; {back}. Lower the learning "
                "rate or the clipping norm of the preset and start a new run in another folder"
            )
    return values


def _combine_wishes(state: TrainState, own: np.ndarray) -> tuple[TrainState, Any]:
    """Starts to combine what processes wish, bool [2]: a checkpoint, and the end after the next one.

    The result is fetched with the metrics of the step that computes ``state``: every process reads the same
    one for the same step, and nothing waits for it. A single process needs no device.
    """
    if jax.process_count() == 1:
        return state, own
    sharding: Any = state.step.sharding
    rows = NamedSharding(sharding.mesh, PartitionSpec(sharding.mesh.axis_names))
    row = own[None].astype(np.int32)
    wishes = jax.make_array_from_callback((sharding.mesh.size, 2), rows, lambda _: row)
    # The step passes through, so that the next one waits for this: on CPUs, collectives of programs that do
    # not depend on each other run at the same time and receive each other's data.
    step, combined = _combiner(sharding)(state.step, wishes)
    return replace(state, step=step), combined


@cache
def _combiner(everywhere: NamedSharding) -> Any:
    return jax.jit(lambda step, wishes: (step, wishes.max(axis=0)), out_shardings=everywhere)
