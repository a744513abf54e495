"""Trains a tiny model in a process of its own, so that tests can kill it, or one of several.

python -m tests.training.worker --store s.h5 --directory run --steps 6
"""

import itertools
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentic_ring import distributed as jobs
from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.hindsight_chains import StratifiedSampler
from agentic_ring.data.store import TrajectoryStore, measure_scaling
from agentic_ring.errors import DataError
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal.cli import run
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog, train
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from agentic_ring.training.train_step import action_loss
from tests.data.synthetic import DOMAIN, TASK

STACK = TransformerConfig(width=16, layers=2, heads=2, ffn_width=32)


def train_tiny(
    store: Path,
    directory: Path,
    steps: int,
    data: int = 1,
    checkpoint_every: int = 2,
    checkpoint_minutes: float = 5.0,
    devices: Sequence[Any] | None = None,
) -> np.ndarray:
    """Trains on a ring of the devices that ``data`` leaves; returns all weights as one array."""
    mesh = make_mesh(MeshShape(data=data), devices)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
    config = TrainConfig(steps, 2, optimizer, checkpoint_every, checkpoint_minutes)
    with (
        closing(Checkpoints(directory / "checkpoints")) as checkpoints,
        closing(MetricsLog(directory / "metrics.jsonl", checkpoints.last_step or 0)) as metrics,
        TrajectoryStore.open(store) as opened,
    ):
        chains = ChainConfig(task=TASK, trajectories=2, action_repeat=1)
        scaling = measure_scaling(opened, TASK, chains.action_repeat)
        loader = ChainLoader(opened, chains, scaling, mesh.shape["ring"])
        sampler = StratifiedSampler(opened.returns(TASK), opened.learnable, 2, 0.5, seed=0)
        dims = DOMAIN.observation_dim, DOMAIN.action_dim, int(opened.lengths.max())
        batches = ChainPipeline(loader, sampler, config.batch_size, mesh)
        model = Model(AgenticTransformerConfig(STACK, *dims))
        state = train(config, model, action_loss, batches, mesh, checkpoints, metrics)
    gathered = jax.jit(lambda p: p, out_shardings=jax.NamedSharding(mesh, jax.P()))(state.params)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gathered)])


def hang_at_batch(number: int) -> None:
    """Lets this process wait without an end for the batch of this number."""
    read, numbers = ChainPipeline.__next__, itertools.count(1)
    ChainPipeline.__next__ = lambda self: time.sleep(1e6) if next(numbers) == number else read(self)


def main(
    store: Path,
    directory: Path,
    steps: int,
    data: int = 1,
    devices: int = 8,
    checkpoint_every: int = 2,
    checkpoint_minutes: float = 5.0,
    distributed: bool = False,
    order: str | None = None,
    fail: bool = False,
    hang: int = 0,
    heartbeat: int = 30,
) -> None:
    """Trains and saves the weights in weights-PROCESS.npy.

    Args:
      fail: Let the first process fail in work that it does for all.
      hang: Number of the batch for which process 1 waits without an end.
      heartbeat: Seconds without a heartbeat after which a process is lost.
      order: The process of each device of the ring, in order: in "0110" the second is process 1's first.
    """
    simulate_cpu_devices(devices)
    if distributed:
        jobs.HEARTBEAT_SECONDS = heartbeat
        jobs.join_processes()
    with jobs.first_process_first("data"):
        if fail:
            raise DataError("there is no data")
    if hang and jax.process_index() == 1:
        hang_at_batch(hang)
    own = [iter(jax.local_devices(process_index=number)) for number in range(jax.process_count())]
    ordered = [next(own[int(number)]) for number in order or ""] or None
    weights = train_tiny(store, directory, steps, data, checkpoint_every, checkpoint_minutes, ordered)
    np.save(directory / f"weights-{jax.process_index()}.npy", weights)


if __name__ == "__main__":
    run(main)
