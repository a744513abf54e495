"""Speed of the main job's training: updates of a preset for a few minutes.

    python experiments/exorl_speed.py --preset small --minutes 5

Trains on hindsight chains of the task's stored trajectories if the data folder has a store; otherwise on one
synthetic batch of random trajectories, in every update again, which needs no package beyond jax, flax and
optax. It says which of the two was used. Nothing is evaluated, and no checkpoint is written.
"""

import argparse
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.attention import order, padded_length
from agentic_ring.data.chain_loader import ChainBatch
from agentic_ring.data.store import data_root, store_path
from agentic_ring.data.tasks import Task, parse_task
from agentic_ring.errors import ArgumentError, NonFiniteLossError, UnknownNameError
from agentic_ring.mesh import make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.terminal.command import run_command
from agentic_ring.training.losses import action_loss
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_config import TrainConfig
from agentic_ring.training.train_step import init_state, make_train_step
from evals.common.rows import write_rows
from evals.compile.step_memory import chain_batch
from evals.speed.interleaved import Spread
from experiments.exorl.presets import PRESETS, Preset

Next = Callable[[], ChainBatch]
"""Function that returns the next batch."""


def synthetic_batch(
    model: AgenticTransformerConfig, training: TrainConfig, trajectories: int, decisions: int, mesh: Mesh
) -> ChainBatch:
    """Returns chains of random trajectories of ``decisions`` steps each; the last trajectory bears loss.

    Args:
      model: sizes of observations and actions.
      training: the number of chains.
      trajectories: members of a chain.
      decisions: steps of a trajectory.
      mesh: devices over which the batch is sharded.
    """
    ring = mesh.shape["ring"]
    length = padded_length(trajectories * decisions, ring, "zigzag")
    shapes = chain_batch(model, training.batch_size, length)(mesh, model.transformer.rules)
    place = jnp.asarray(order("zigzag", length, ring), jnp.int32)
    valid = place < trajectories * decisions
    known = {
        "timestep": jnp.where(valid, place % decisions, 0),
        "trajectory": jnp.where(valid, place // decisions, 0),
        "position": jnp.where(valid, place, -1),
        "completion": jnp.zeros(length),
    }

    def make(key: jax.Array) -> ChainBatch:
        fields = {}
        for number, (name, shape) in enumerate(vars(shapes.steps).items()):
            if name in known:
                fields[name] = jnp.broadcast_to(known[name], shape.shape).astype(shape.dtype)
            else:
                own = jax.random.fold_in(key, number)
                fields[name] = jax.random.uniform(own, shape.shape, shape.dtype, -1.0, 1.0)
        weight = valid & (place // decisions == trajectories - 1)
        steps = type(shapes.steps)(**fields)
        seed = jnp.zeros(shapes.seed.shape, shapes.seed.dtype)
        whole = jnp.broadcast_to(weight, shapes.weight.shape).astype(shapes.weight.dtype)
        return ChainBatch(steps, whole, seed, shapes.layout)

    shardings: Any = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0))


def batches_of(
    preset: Preset, task: Task, mesh: Mesh, data: Path, stack: ExitStack
) -> tuple[Any, Any, Next, str]:
    """Returns the model's and the training's configuration, the batches, and what their data is."""
    stores = sorted(data.glob(str(store_path(Path(), task.domain.name, "*"))))
    source = f"synthetic, as {data} has no store of {task.domain.name}"
    if stores:
        try:
            from agentic_ring.data.store import TrajectoryStore
            from experiments.exorl.pipeline import chain_batches, resolve
        except ModuleNotFoundError as error:
            source = f"synthetic, as the package {error.name} is not installed"
        else:
            config = resolve(preset, task, stores[0], mesh, "leaders", seed=0)
            store = stack.enter_context(TrajectoryStore.open(stores[0]))
            pipeline = chain_batches(config, store, mesh)
            return config.model, config.training, lambda: next(pipeline), f"store {stores[0].name}"
    decisions = task.domain.decisions(preset.action_repeat.get(task.domain.name, 1))
    model, training = preset.model(task.domain, decisions), preset.training(decisions, mesh)
    batch = synthetic_batch(model, training, preset.trajectories, decisions, mesh)
    return model, training, lambda: batch, source


def exorl_speed(preset: Preset, task: Task, minutes: float, data: Path) -> dict[str, Any]:
    """Trains for ``minutes`` after the first update, which compiles, and returns a row of the speed.

    Raises:
      ArgumentError: the time is not positive.
      NonFiniteLossError: a loss is not finite.
    """
    if not minutes > 0:
        raise ArgumentError(f"minutes is {minutes}; it must be positive")
    mesh = make_mesh()
    with ExitStack() as stack, jax.set_mesh(mesh):
        config, training, batches, source = batches_of(preset, task, mesh, data, stack)
        model = Model(config)
        optimizer = make_optimizer(training.optimizer, training.steps)
        step = make_train_step(model, action_loss, optimizer, training.optimizer.accumulation)
        update = jax.jit(step, donate_argnames="state")
        state = init_state(model, optimizer, training.seed, mesh, config.transformer.rules)
        seconds: list[float] = []
        losses: list[float] = []
        tokens = 0
        while sum(seconds[1:]) < 60 * minutes:
            started = time.perf_counter()
            batch = batches()
            tokens = batch.weight.size * TOKENS_PER_STEP
            state, metrics = update(state, batch)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - started)
            if not math.isfinite(losses[-1]):
                raise NonFiniteLossError(f"the loss of update {len(losses)} is {losses[-1]}, data {source}")
    spread = Spread.of(tokens / spent for spent in seconds[1:])
    return {
        "preset": preset.name,
        "task": task.full_name,
        "data": source,
        "parameters": model.parameter_count(),
        "tokens_per_update": tokens,
        "updates": len(losses),
        "tokens_per_second": spread.median,
        "tokens_per_second_low": spread.low,
        "tokens_per_second_high": spread.high,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def main() -> None:
    """Reads the flags, measures, prints the row and writes it."""
    parser = argparse.ArgumentParser(description="Speed of the main job's training, for a few minutes.")
    parser.add_argument("--task", default="walker_run", help="Task of the chains. Default: walker_run.")
    parser.add_argument("--preset", default="small", help="Size: demo, small or paper. Default: small.")
    parser.add_argument("--minutes", type=float, default=5.0, help="Minutes of training. Default: 5.")
    parser.add_argument("--num-trajectories", type=int, help="Trajectories per chain. Default: the preset's.")
    parser.add_argument("--data", type=Path, help="Folder of the data. Default: $AGENTIC_RING_DATA, or data.")
    parser.add_argument("--rows-to", type=Path, help="CSV file for the row. Default: none is written.")
    flags = parser.parse_args()
    if flags.preset not in PRESETS:
        raise UnknownNameError("preset", flags.preset, tuple(PRESETS))
    preset = PRESETS[flags.preset]
    if flags.num_trajectories is not None:
        preset = preset.with_trajectories(flags.num_trajectories)
    row = exorl_speed(preset, parse_task(flags.task), flags.minutes, flags.data or data_root())
    for name, value in row.items():
        print(f"{name:24}{value}")
    if flags.rows_to is not None:
        write_rows(flags.rows_to, [row])


if __name__ == "__main__":
    run_command(main)
