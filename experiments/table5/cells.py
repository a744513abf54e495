"""The cells of Table 5: one task, method and training seed each."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentic_ring.data.tasks import parse_task
from agentic_ring.files.run_folder import Stages, enter_directory, only_writer, read_config
from agentic_ring.results.results_file import Figure, Results, read_results, write_results
from agentic_ring.rollouts.returns import roll_out, trial_figures
from agentic_ring.rollouts.trials import TrialPolicy
from agentic_ring.training.loop import read_metrics
from experiments.common.cells import RESULTS_FILE
from experiments.table5.methods import method_named
from experiments.table5.presets import TablePreset

SCRIPT = Path(__file__).parents[1] / "table5_exorl.py"
CURVE = "learning_curve/"
"""Names of the figures of a learning curve begin so, and go on with the share of the updates, as 0.25."""


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
    task = parse_task(cell.task)
    config = method_named(cell.method).resolve(preset.for_domain(task.domain), task, store, cell.seed)
    with enter_directory(cell.folder(output), config, resume=True):
        pass  # the cell's process enters it again


def run_cell(cell: TableCell, output: Path) -> None:
    """Trains and rolls out a cell in this process, by its configuration.

    Before each regular checkpoint it is rolled out as well, in the same environments, for the learning curve;
    the seconds of training include that.

    Raises:
      DataError: the cell was not prepared.
    """
    directory, method, task = cell.folder(output), method_named(cell.method), parse_task(cell.task)
    config: Any = read_config(directory, method.config_kind)
    with only_writer(directory):
        stages = Stages()
        stages.keep_in(directory)

        def returns(policies: Sequence[TrialPolicy]) -> np.ndarray:
            repeat = method.action_repeat(config)
            return roll_out(policies, method.title, task, repeat, config.evaluation)[0]

        def last_trial(policies: Sequence[TrialPolicy]) -> dict[str, float]:
            with stages.stage("learning curve"):
                return {"return": float(returns(policies)[:, -1].mean())}

        with stages.stage("training"):
            policies = method.train(config, directory, last_trial)
        with stages.stage("evaluation"):
            figures = trial_figures(returns(policies))
        figures += _learning_curve(directory / "metrics.jsonl", figures)
        results = Results.of_this_process(asdict(config), stages.seconds, figures)
        write_results(directory / RESULTS_FILE, results)


def _learning_curve(metrics: Path, figures: Sequence[Figure]) -> list[Figure]:
    """Return of the last trial by share of the updates, as training has measured it, and at its end."""
    last = next(figure for figure in figures if figure.name == "return/last_trial")
    rows = read_metrics(metrics) if metrics.exists() else []  # nothing trains the random policy
    measured = {row["step"] / rows[-1]["step"]: row["return"] for row in rows if "return" in row}
    curve = [Figure(f"{CURVE}{share:.4g}", value, "return", n=last.n) for share, value in measured.items()]
    return [*curve, replace(last, name=f"{CURVE}1")] if rows else []
