"""The training loop of every model."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.errors import ConfigError, NonFiniteLossError, check_at_least_one
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.model import Model, Params
from agentic_ring.progress import progress, say
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.metrics import MetricsLog
from agentic_ring.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from agentic_ring.training.train_step import Loss, TrainState, abstract_state, init_state, make_train_step


@dataclass(frozen=True)
class TrainConfig:
    """How long and how to train."""

    steps: int
    batch_size: int
    """Rows of one update (chains, or rows of text), over all devices."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint_every: int = 100
    log_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(self, "steps", "batch_size", "checkpoint_every", "log_every")
        if self.batch_size % self.optimizer.accumulation:
            raise ConfigError(
                f"batch_size {self.batch_size} does not divide into {self.optimizer.accumulation} parts"
            )


class Batches(Protocol):
    """An endless iterator of batches, each with a ``weight``, that can be put back where it stood."""

    def __next__(self) -> Any:
        """The next batch, on the devices."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands, as JSON-able data."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state that ``get_state`` gave."""
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
) -> TrainState:
    """Trains up to ``config.steps`` updates, from the newest checkpoint where there is one.

    Args:
      config: how long and how.
      model: what is trained.
      loss_function: one of ``training.losses``.
      batches: of rows as the loss takes them.
      mesh: of devices.
      checkpoints: where the state goes, and comes from.
      metrics: where every step's loss and speed go.
      tokens_per_place: tokens that stand at each place of a batch's weight; only the speed counts them.
      rules: how arrays lie on the mesh.
      start: makes the parameters to start from where there is no checkpoint; fresh ones where absent.
      frozen: weights that the model needs and that are not trained, where it has any.

    Raises:
      NonFiniteLossError: names the step, and the checkpoint to go back to.
      CheckpointError: the newest checkpoint cannot be read.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    learning_rate = learning_rate_schedule(config.optimizer, config.steps)
    train_step = jax.jit(
        make_train_step(model, loss_function, optimizer, config.optimizer.accumulation),
        donate_argnames="state",
    )

    def fresh() -> TrainState:
        params = None if start is None else start()
        return init_state(model, optimizer, config.seed, mesh, rules, params)

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
) -> TrainState:
    """Applies any learner's updates up to ``config.steps``, from the newest checkpoint where there is one.

    Args:
      config: of which the optimiser is the learner's own business.
      update: one update, and its measures, ``loss`` among them; may donate the state.
      fresh: makes the state to start from.
      like: its shapes and shardings, to restore a checkpoint into.
      batches, checkpoints, metrics: as in ``train``.
      learning_rate: of an update, counted from 1.
      tokens: in a batch, for the speed.

    Raises:
      NonFiniteLossError, CheckpointError: as in ``train``.
    """
    if checkpoints.last_step is None:
        state = fresh()
    else:
        state, data_state = checkpoints.restore(checkpoints.last_step, like())
        batches.set_state(data_state)
        say(f"resuming from step {checkpoints.last_step} of {config.steps}")
    first = int(state.step)
    clock = time.monotonic()
    recent: list[float] = []
    with progress("training", config.steps) as advance:
        for step in range(first + 1, config.steps + 1):
            batch = next(batches)
            state, measured = update(state, batch)
            values = {name: float(measured[name]) for name in ("loss", *measured)}
            # A gradient may overflow where the loss does not, and would spoil the next checkpoint.
            for name, value in values.items():
                if not math.isfinite(value):
                    raise NonFiniteLossError(_non_finite_message(step, name, value, checkpoints.last_step))
            loss = values["loss"]
            recent.append(loss)
            now = time.monotonic()
            tokens_per_second = tokens(batch) / (now - clock)
            clock = now
            if step % config.log_every == 0 or step == config.steps:
                values |= {"learning_rate": learning_rate(step), "tokens_per_second": tokens_per_second}
                metrics.write(step, values)
            if step % config.checkpoint_every == 0 or step == config.steps:
                # One batch's loss is too noisy to tell which checkpoint is best.
                checkpoints.save(step, state, batches.get_state(), sum(recent) / len(recent))
                recent.clear()
            advance(step, f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s")
    return state


def _non_finite_message(step: int, name: str, value: float, last_step: int | None) -> str:
    back = f"the last good checkpoint is step {last_step}" if last_step else "there is no checkpoint yet"
    return (
        f"the {name.replace('_', ' ')} is {value} at step {step}; {back}. Lower the learning rate or the "
        "clipping norm of the preset and start anew in another folder"
    )
