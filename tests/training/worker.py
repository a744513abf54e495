"""Trains a tiny model, in this process or others, so that tests can kill them; and reads what it logged.

python -m tests.training.worker --store s.h5 --directory run --steps 6
"""

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
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
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, action_loss
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal.cli import run
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog, read_metrics, train
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from tests.data.synthetic import DOMAIN, TASK

ROOT = Path(__file__).resolve().parents[2]


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
        stack = TransformerConfig(width=16, layers=2, heads=2, ffn_width=32)
        model = Model(AgenticTransformerConfig(stack, *dims))
        state = train(config, model, action_loss, batches, mesh, checkpoints, metrics)
    gathered = jax.jit(lambda p: p, out_shardings=jax.NamedSharding(mesh, jax.P()))(state.params)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gathered)])


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

    ``order`` are the processes of the ring's devices, and ``hang`` is the batch that process 1 never gets.
    """
    simulate_cpu_devices(devices)
    if distributed:
        jobs.HEARTBEAT_SECONDS = heartbeat
        jobs.join_processes()
    with jobs.first_process_first("data"):
        if fail:
            raise DataError("there is no data")
    if hang and jax.process_index() == 1:
        read, numbers = ChainPipeline.__next__, itertools.count(1)
        ChainPipeline.__next__ = lambda self: time.sleep(1e6) if next(numbers) == hang else read(self)
    own = [iter(jax.local_devices(process_index=number)) for number in range(jax.process_count())]
    ordered = [next(own[int(number)]) for number in order or ""] or None
    weights = train_tiny(store, directory, steps, data, checkpoint_every, checkpoint_minutes, ordered)
    np.save(directory / f"weights-{jax.process_index()}.npy", weights)


def worker_command(store: Path, directory: Path, **flags) -> list[str]:
    directory.mkdir(exist_ok=True)
    flags = {"store": store, "directory": directory} | flags
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "tests.training.worker", *options]


def start_worker(store: Path, directory: Path, **options) -> subprocess.Popen:
    """A worker process; upper-case options are environment variables, the others flags."""
    environment = os.environ | {name: str(value) for name, value in options.items() if name.isupper()}
    flags = {name: value for name, value in options.items() if not name.isupper()}
    command = worker_command(store, directory, **flags)
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@contextmanager
def started_job(store: Path, directory: Path, **options) -> Iterator[list[subprocess.Popen]]:
    """The two worker processes of a job, with four devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": 2, "devices": 2}
    workers = [start_worker(store, directory, distributed=True, JAX_PROCESS_ID=n, **options) for n in (0, 1)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def await_rows(directory: Path, count: int, *workers: subprocess.Popen) -> None:
    """Waits until running workers have logged so many steps."""
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        for worker in workers:
            assert worker.poll() is None, worker.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(worker: subprocess.Popen) -> tuple[int, list[str]]:
    """Waits for the end of a process; returns its status and what it says besides its progress."""
    _, errors = worker.communicate(timeout=400)
    return worker.returncode, messages(errors)


def messages(printed: str) -> list[str]:
    """The lines that a process has printed besides the progress, and the waiting, of a slow machine."""
    return [line for line in printed.splitlines() if not re.match(r"training |process \d+ has waited ", line)]


def measured(directory: Path) -> list[dict[str, float]]:
    """Everything in the log except for speed."""
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [{name: row[name] for name in row.keys() - {"tokens_per_second"}} for row in rows]


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in measured(directory)]


if __name__ == "__main__":
    run(main)
