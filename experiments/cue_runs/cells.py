"""The cells of the experiment: an arm and a training seed each, trained and rolled out in one process."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from agentic_ring.files.folder_lock import only_writer
from agentic_ring.files.run_folder import Stages, enter_directory, read_config
from agentic_ring.mesh import mesh_on_first_devices, simulate_cpu_devices
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.training.metrics_log import read_metrics
from evals.in_context.verdict import Case
from experiments.common.cells import RESULTS_FILE
from experiments.cue_runs.arms import ArmConfig, train_arm
from experiments.cue_runs.evaluation import LONGEST, record, roll_out_cases

SCRIPT = Path(__file__).parents[1] / "in_context.py"


@dataclass(frozen=True)
class CueCell:
    """One cell."""

    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed}"

    def folder(self, output: Path) -> Path:
        """The cell's folder."""
        return output / "arms" / f"{self.arm}-seed{self.seed}"

    def command(self, output: Path) -> list[str]:
        """Command of the process that computes the cell."""
        return [sys.executable, str(SCRIPT), "--cell", self.arm, str(self.seed), "--output", str(output)]


def prepare_cell(cell: CueCell, config: ArmConfig, output: Path) -> None:
    """Writes the cell's configuration.

    Raises:
      ConfigError: the folder contains the cell with other settings.
    """
    with enter_directory(cell.folder(output), config, resume=True):
        pass  # the cell's process enters it again


def run_cell(cell: CueCell, output: Path) -> None:
    """Trains and rolls out a cell in this process, by its configuration.

    Raises:
      DataError: the cell was not prepared.
      CheckpointError: the folder's checkpoints are of another configuration.
    """
    directory = cell.folder(output)
    config = read_config(directory, ArmConfig)
    ring = config.mesh.ring
    if ring is not None and ring > 1:
        simulate_cpu_devices(ring)
    mesh = mesh_on_first_devices(config.mesh)
    with only_writer(directory):
        stages = Stages()
        stages.keep_in(directory)
        with stages.stage("training"):
            params = train_arm(config, mesh, directory)
        with stages.stage("evaluation"):
            returns = roll_out_cases(config, params, mesh, directory)
            if config.arm == LONGEST:
                record(config, params, mesh, directory)
        figures = _figures(directory, len(config.stages), returns)
        results = Results.of_this_process(asdict(config), stages.seconds, figures)
        write_results(directory / RESULTS_FILE, results)


def _figures(directory: Path, stages: int, returns: dict[Case, np.ndarray]) -> list[Figure]:
    rows = read_metrics(directory / f"stage{stages}" / "metrics.jsonl")
    recent = rows[-max(1, len(rows) // 10) :]
    speed = float(np.median([row["tokens_per_second"] for row in rows]))
    return [
        Figure("loss/final", float(np.mean([row["loss"] for row in recent])), "squared error"),
        Figure("tokens_per_second", speed, "tokens/s", n=len(rows)),
        *(
            Figure("/".join(map(str, case)), float(found.mean()), "return", n=len(found))
            for case, found in returns.items()
        ),
    ]
