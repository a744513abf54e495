"""Speed of the main job's training, measured by its own script in a process of its own."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from agentic_ring.errors import AgenticRingError
from agentic_ring.provenance import SOURCE
from agentic_ring.results.rows import read_rows
from evals.gpu.rows import Found

COLUMNS = ("updates", "tokens_per_update", "loss_first", "loss_last")


class MainJobFailedError(AgenticRingError, RuntimeError):
    """The script of the main job's speed ended with an error."""


def main_job(preset: str, minutes: float, num_trajectories: int | None) -> Found:
    """Runs ``experiments/exorl_speed.py``; its flags describe the arguments.

    Returns:
      Tokens per second. The details name the data: a store, or synthetic chains.

    Raises:
      ModuleNotFoundError: flax or optax is not installed.
      MainJobFailedError: the script failed; with the last line of its messages.
    """
    for package in ("flax", "optax"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with TemporaryDirectory() as folder:
        rows_to = Path(folder) / "row.csv"
        command = [sys.executable, "-m", "experiments.exorl_speed", "--preset", preset]
        command += ["--minutes", str(minutes), "--rows-to", str(rows_to)]
        if num_trajectories is not None:
            command += ["--num-trajectories", str(num_trajectories)]
        ended = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(ended.stderr, file=sys.stderr)
            last = [line for line in ended.stderr.splitlines() if line.strip()][-1:]
            raise MainJobFailedError(f"exit status {ended.returncode}: {''.join(last)}")
        row = read_rows(rows_to)[0]
    speeds = (float(row[f"tokens_per_second{end}"]) for end in ("", "_low", "_high"))
    value, low, high = speeds
    details = {"data": row["data"], **{name: float(row[name]) for name in COLUMNS}}
    return Found(value, "tokens/s", low, high, details)
