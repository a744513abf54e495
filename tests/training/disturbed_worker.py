"""One process of a job that trains a tiny model, and in which something goes wrong.

python -m tests.training.disturbed_worker --store s.h5 --directory run --steps 6 --hang 3
"""

import itertools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentic_ring.data.chain_loader import ChainPipeline
from agentic_ring.distributed import first_process_first, join_processes
from agentic_ring.errors import DataError
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.terminal.cli import run
from tests.training.worker import train_tiny


def hang_at_batch(number: int) -> None:
    """Lets this process wait without an end for the batch of this number."""
    read, numbers = ChainPipeline.__next__, itertools.count(1)

    def read_or_hang(pipeline: ChainPipeline) -> Any:
        if next(numbers) == number:
            time.sleep(1e6)
        return read(pipeline)

    ChainPipeline.__next__ = read_or_hang


def main(
    store: Path,
    directory: Path,
    steps: int,
    devices: int,
    fail: bool = False,
    hang: int = 0,
) -> None:
    """Trains and saves the weights in weights-PROCESS.npy.

    Args:
      fail: Let the first process fail in that work.
      hang: Number of the batch for which process 1 waits without an end.
    """
    simulate_cpu_devices(devices)
    join_processes()
    with first_process_first("data"):
        if fail:
            raise DataError("there is no data")
    if hang and jax.process_index() == 1:
        hang_at_batch(hang)
    weights = train_tiny(store, directory, steps, data=2)
    np.save(directory / f"weights-{jax.process_index()}.npy", weights)


if __name__ == "__main__":
    run(main)
