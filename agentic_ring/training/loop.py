"""The training loop: resuming, updates, metrics, checkpoints and the progress line on the console."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.distributed import compile_together, watched_steps
from agentic_ring.errors import NonFiniteLossError, StopRequested
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.model import Model, Params
from agentic_ring.stopping import deferred
from agentic_ring.terminal.progress import progress, say
from agentic_ring.training.agreement import Wishes, dispatch_wishes, fetch_wishes
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.metrics_log import MetricsLog
from agentic_ring.training.optimizer import learning_rate_schedule, make_optimizer
from agentic_ring.training.train_config import TrainConfig
from agentic_ring.training.train_step import Loss, TrainState, abstract_state, init_state, make_train_step

Measure = Callable[[TrainState], dict[str, float]]
"""Returns further metrics of a state that is being trained."""


class Batches(Protocol):
    """An endless iterator of batches, each with a ``weight``, whose state can be saved and restored."""

    def __next__(self) -> Any:
        """The next batch, on the devices."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The state of the iterator, as data that fits JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state that ``get_state`` returned."""
        ...


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
      config: length and settings.
      loss_function: one of ``training.losses``.
      checkpoints: where the state is saved and restored.
      metrics: log of loss and speed.
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
    learning_rate = learning_rate_schedule(config.optimizer, config.steps)
    train_step = compile_together(
        jax.jit(
            make_train_step(model, loss_function, optimizer, config.optimizer.accumulation),
            donate_argnames="state",
        )
    )

    def fresh() -> TrainState:
        return init_state(model, optimizer, config.seed, mesh, rules, start() if start else None)

    with jax.set_mesh(mesh):
        return run_updates(
            config,
            lambda state, batch: train_step(state, batch, frozen),
            fresh,
            lambda: abstract_state(model, optimizer, mesh, rules),
            batches,
            checkpoints,
            metrics,
            learning_rate=lambda step: float(jnp.asarray(learning_rate(step - 1))),
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
      fresh: creates the initial state.
      like: returns shapes and shardings of the state, for restoring a checkpoint.
      batches, checkpoints, metrics: as in ``train``.
      learning_rate: learning rate of an update, counted from 1.
      tokens: number of tokens in a batch, for the reported speed.
      measure: returns further metrics of the state, such as its return in the environment. It is called
        before each regular checkpoint but the last, and a run that was killed between both calls it again.

    Metrics are fetched one step late: the next batch is placed and the next update dispatched while the
    devices still compute. A checkpoint waits for the metrics of its own step.

    Raises:
      NonFiniteLossError, CheckpointError, StopRequested: as in ``train``.
    """
    losses = _MeanLoss()
    if checkpoints.last_step is None:
        state = fresh()
    else:
        state, saved = checkpoints.restore(checkpoints.last_step, like())
        losses = _MeanLoss(**saved.pop("losses", {}))
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

        def finish(sent: _Dispatched, reached: TrainState | None = None) -> Wishes:
            """Waits for a step, measures the state reached if given, logs, and returns the job's wishes."""
            nonlocal clock
            values = _finite_values(sent, checkpoints)
            losses.add(values["loss"])
            now = time.monotonic()
            tokens_per_second = sent.tokens / (now - clock)
            further = {} if measure is None or reached is None else measure(reached)
            if further or sent.step % config.log_every == 0 or sent.step == config.steps:
                rates = {"learning_rate": learning_rate(sent.step), "tokens_per_second": tokens_per_second}
                metrics.write(sent.step, values | rates | further)
            advance(
                sent.step,
                f"{tokens_per_second:,.0f} tokens/s",
                loss=values["loss"],
                last_return=further.get("return"),
            )
            clock = now if reached is None else time.monotonic()  # the speed is that of training alone
            return fetch_wishes(sent.wishes)

        for step in range(first + 1, config.steps + 1):
            batch = next(batches)
            enter_step()
            state, measured = update(state, batch)
            overdue = time.monotonic() - saved_at >= 60 * config.checkpoint_minutes
            own = Wishes(save=overdue and jax.process_index() == 0, stop=stop_requested() is not None)
            state, asked = dispatch_wishes(state, own)
            current = _Dispatched(step, measured, asked, tokens(batch))
            wishes = Wishes() if previous is None else finish(previous)
            previous = current
            regular = step % config.checkpoint_every == 0 or step == config.steps
            if not (regular or wishes.save or wishes.stop):
                continue
            wishes |= finish(current, state if regular and step < config.steps else None)
            previous = None
            # A checkpoint at a moment that a clock or a signal chose does not compete for the best one.
            mean = losses.take() if regular else None
            checkpoints.save(step, state, batches.get_state() | {"losses": asdict(losses)}, mean)
            saved_at = time.monotonic()
            if wishes.stop:
                checkpoints.wait()
                signal = stop_requested() or "another process"
                raise StopRequested(f"stopped by {signal}, saved at step {step} of {config.steps}")
    return state


@dataclass
class _MeanLoss:
    """Mean loss since the last regular checkpoint; the loss of one batch is too noisy to select the best."""

    total: float = 0.0
    count: int = 0

    def add(self, loss: float) -> None:
        self.total += loss
        self.count += 1

    def take(self) -> float:
        """Returns the mean and starts anew."""
        mean = self.total / self.count
        self.total, self.count = 0.0, 0
        return mean


@dataclass(frozen=True)
class _Dispatched:
    """A step that the devices may still compute."""

    step: int
    measured: dict[str, Any]
    wishes: Any
    tokens: int


def _finite_values(sent: _Dispatched, checkpoints: Checkpoints) -> dict[str, float]:
    """Waits for the metrics of a step; the loss comes first."""
    values = {name: float(sent.measured[name]) for name in {"loss": None, **sent.measured}}
    # A gradient may overflow although the loss is finite, and would corrupt the next checkpoint.
    for name, value in values.items():
        if not math.isfinite(value):
            raise NonFiniteLossError(_non_finite_message(sent.step, name, value, checkpoints.last_step))
    return values


def _non_finite_message(step: int, name: str, value: float, last_step: int | None) -> str:
    back = f"the last good checkpoint is step {last_step}" if last_step else "there is no checkpoint yet"
    return (
        f"the {name.replace('_', ' ')} is {value} at step {step}; {back}. Lower the learning rate or the "
        "clipping norm of the preset and start a new run in another folder"
    )
