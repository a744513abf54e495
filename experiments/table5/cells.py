"""The cells of Table 5: one task, method and training seed each."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentic_ring.data.tasks import parse_task
from agentic_ring.files.folder_lock import only_writer
from agentic_ring.files.run_folder import Stages, enter_directory, read_config
from evals.common.results import Results, read_results, write_results
from evals.rollouts.returns import roll_out, trial_figures
from experiments.common.cells import RESULTS_FILE
from experiments.table5.methods import method_named
from experiments.table5.presets import TablePreset

SCRIPT = Path(__file__).parents[1] / "table5_exorl.py"


@dataclass(frozen=True)
class TableCell:
    """One cell; ``task`` is a full name, such as walker_run."""

    task: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.method} seed {self.seed}"

    def folder(self, output: Path) -> Path:
        """The cell's folder."""
        return output / "cells" / f"{self.task}-{self.method}-seed{self.seed}"

    def results(self, output: Path) -> Results | None:
        """The cell's results; None until it is finished."""
        path = self.folder(output) / RESULTS_FILE
        return read_results(path) if path.exists() else None

    def command(self, output: Path) -> list[str]:
        """Command of the process that computes the cell."""
        flags = ["--cell", self.task, self.method, str(self.seed), "--output", str(output)]
        return [sys.executable, str(SCRIPT), *flags]


def prepare_cell(cell: TableCell, preset: TablePreset, store: Path, output: Path) -> None:
    """Writes the cell's configuration.

    Raises:
      ConfigError: the folder contains the cell with other settings.
    """
    config = method_named(cell.method).resolve(preset, parse_task(cell.task), store, cell.seed)
    with enter_directory(cell.folder(output), config, resume=True):
        pass  # the cell's process enters it again


def run_cell(cell: TableCell, output: Path) -> None:
    """Trains and rolls out a cell in this process, by its configuration.

    Raises:
      DataError: the cell was not prepared.
    """
    directory, method = cell.folder(output), method_named(cell.method)
    config: Any = read_config(directory, method.config_kind)
    with only_writer(directory):
        stages = Stages()
        stages.keep_in(directory)
        with stages.stage("training"):
            policies = method.train(config, directory)
        with stages.stage("evaluation"):
            task, repeat = parse_task(cell.task), method.action_repeat(config)
            returns, _ = roll_out(policies, method.title, task, repeat, config.evaluation)
        results = Results.of_this_process(asdict(config), stages.seconds, trial_figures(returns))
        write_results(directory / RESULTS_FILE, results)
