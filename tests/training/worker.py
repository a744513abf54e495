"""Trains a tiny model in a separate process, so that tests can kill it or start two of them.

python -m tests.training.worker --store s.h5 --directory run --steps 6
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.hindsight_chains import StratifiedSampler
from agentic_ring.data.store import TrajectoryStore, measure_scaling
from agentic_ring.distributed import join_processes
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal.cli import run
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import train
from agentic_ring.training.losses import action_loss
from agentic_ring.training.metrics_log import MetricsLog
from agentic_ring.training.optimizer import OptimizerConfig
from agentic_ring.training.train_config import TrainConfig
from agentic_ring.training.train_step import Loss
from tests.data.synthetic import DOMAIN, TASK

STACK = TransformerConfig(width=16, layers=2, heads=2, ffn_width=32)


def train_tiny(
    store: Path,
    directory: Path,
    steps: int,
    learning_rate: float = 1e-2,
    data: int = 1,
    checkpoint_every: int = 2,
    checkpoint_minutes: float = 5.0,
    loss: Loss = action_loss,
    devices: Sequence[Any] | None = None,
) -> np.ndarray:
    """Trains on a ring of the devices that ``data`` leaves; returns all weights as one array."""
    mesh = make_mesh(MeshShape(data=data), devices)
    checkpoints = Checkpoints(directory / "checkpoints")
    metrics = MetricsLog(directory / "metrics.jsonl", checkpoints.last_step or 0)
    config = TrainConfig(
        steps=steps,
        batch_size=2,
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2),
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
    )
    try:
        with TrajectoryStore.open(store) as opened:
            chains = ChainConfig(task=TASK, trajectories=2, action_repeat=1)
            scaling = measure_scaling(opened, TASK, chains.action_repeat)
            loader = ChainLoader(opened, chains, scaling, mesh.shape["ring"])
            sampler = StratifiedSampler(opened.returns(TASK), opened.learnable, 2, 0.5, seed=0)
            model = Model(
                AgenticTransformerConfig(
                    STACK, DOMAIN.observation_dim, DOMAIN.action_dim, int(opened.lengths.max())
                )
            )
            batches = ChainPipeline(loader, sampler, config.batch_size, mesh)
            state = train(config, model, loss, batches, mesh, checkpoints, metrics)
    finally:
        metrics.close()
        checkpoints.close()
    gathered = jax.jit(lambda p: p, out_shardings=jax.NamedSharding(mesh, jax.P()))(state.params)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gathered)])


def devices_in_order(order: str) -> list[Any]:
    """All devices, in an order given by the process of each: in "0110" the second is process 1's first."""
    devices = [iter(jax.local_devices(process_index=number)) for number in range(jax.process_count())]
    return [next(devices[int(process)]) for process in order]


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
) -> None:
    """Trains and saves the weights in weights-PROCESS.npy."""
    simulate_cpu_devices(devices)
    if distributed:
        join_processes()
    weights = train_tiny(
        store,
        directory,
        steps,
        data=data,
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
        devices=None if order is None else devices_in_order(order),
    )
    np.save(directory / f"weights-{jax.process_index()}.npy", weights)


if __name__ == "__main__":
    run(main)
