"""The processes of Table 5: its cells of one task, method and training seed, and memory of the paper's model.

The ``oom`` cells are computed: the 350M model's own training step on chains of 1000 steps of 4 tokens is
compiled for a machine, as Table 3's cells are (``evals.compile.maximum_context``).
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentic_ring.attention import padded_length
from agentic_ring.data.domains import DOMAINS, Domain, parse_task
from agentic_ring.errors import UnknownNameError
from agentic_ring.files.run_folder import Dataclass, Stages, enter_directory, only_writer, read_config
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP
from agentic_ring.results.results_file import Figure, Results, read_results, write_results
from agentic_ring.rollouts.returns import roll_out, trial_figures
from agentic_ring.rollouts.trials import TrialPolicy
from agentic_ring.terminal.progress import say
from agentic_ring.training.loop import read_metrics
from evals.compile.machines import machine
from evals.compile.maximum_context import COMPILE_SECONDS, Finding, Program
from evals.compile.step_memory import TrainStep, chain_step
from experiments.common.cells import RESULTS_FILE, CellPool
from experiments.exorl.presets import PRESETS
from experiments.table5.methods import AGENTIC, DOMAIN_MODELS, DomainMethod, method_named
from experiments.table5.presets import TablePreset

SCRIPT = Path(__file__).parents[1] / "table5_exorl.py"
CURVE = "learning_curve/"
"""Names of the figures of a learning curve begin so, and go on with the share of the updates, as 0.25."""


@dataclass(frozen=True)
class TableCell:
    """One cell: a method in a task, or the training of a model that all tasks of a domain share.

    ``task`` is a full name, such as walker_run; or it is the domain's, and ``method`` names the model.
    """

    task: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.method} seed {self.seed}"

    @property
    def trains_domain(self) -> bool:
        """Whether it is the training for a domain."""
        return self.task in DOMAINS

    @property
    def domain(self) -> Domain:
        """The domain, or the task's."""
        return DOMAINS[self.task] if self.trains_domain else parse_task(self.task).domain

    @property
    def training(self) -> "TableCell | None":
        """The cell that trains the model which this one only rolls out, if that is shared."""
        method = None if self.trains_domain else method_named(self.method)
        if not isinstance(method, DomainMethod):
            return None
        return TableCell(self.domain.name, method.model, self.seed)

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
    """Writes the cell's configuration; a ConfigError if its folder has another one."""
    sized = preset.for_domain(cell.domain)
    config: Dataclass
    if cell.trains_domain:
        method = DOMAIN_MODELS[cell.method]
        config = method.resolve_training(sized, cell.domain, store, cell.seed)
    else:
        config = method_named(cell.method).resolve(sized, parse_task(cell.task), store, cell.seed)
    with enter_directory(cell.folder(output), config, resume=True):
        pass  # the cell's process enters it again


def run_cell(cell: TableCell, output: Path) -> None:
    """Computes a prepared cell in this process; otherwise a DataError. The training for a domain comes first.

    Before each regular checkpoint it is rolled out as well, in the same environments, for the learning curve;
    the seconds of training include that.
    """
    directory, stages = cell.folder(output), Stages()
    with only_writer(directory):
        stages.keep_in(directory)
        config, figures = (_train_domain if cell.trains_domain else _roll_out)(cell, output, stages)
        results = Results.of_this_process(asdict(config), stages.seconds, figures)
        write_results(directory / RESULTS_FILE, results)


def _train_domain(cell: TableCell, output: Path, stages: Stages) -> tuple[Dataclass, list[Figure]]:
    directory, method = cell.folder(output), DOMAIN_MODELS[cell.method]
    config: Any = read_config(directory, method.trained_kind)
    with stages.stage("training"):
        method.train(config, directory)
    loss = read_metrics(directory / "metrics.jsonl")[-1]["loss"]
    return config, [Figure("loss/final", loss, "of the last update")]


def _roll_out(cell: TableCell, output: Path, stages: Stages) -> tuple[Dataclass, list[Figure]]:
    directory, method, task = cell.folder(output), method_named(cell.method), parse_task(cell.task)
    config: Any = read_config(directory, method.config_kind)

    def returns(policies: Sequence[TrialPolicy]) -> np.ndarray:
        return roll_out(policies, method.title, task, method.action_repeat(config), config.evaluation)[0]

    def last_trial(policies: Sequence[TrialPolicy]) -> dict[str, float]:
        with stages.stage("learning curve"):
            return {"return": float(returns(policies)[:, -1].mean())}

    if isinstance(method, DomainMethod):
        assert cell.training is not None
        policies = method.policies(config, cell.training.folder(output))
    else:
        with stages.stage("training"):
            policies = method.train(config, directory, last_trial)
    with stages.stage("evaluation"):
        figures = trial_figures(returns(policies))
    return config, figures + _learning_curve(directory / "metrics.jsonl", figures)


def _learning_curve(metrics: Path, figures: Sequence[Figure]) -> list[Figure]:
    """Return of the last trial by share of the updates, as training has measured it, and at its end."""
    last = next(figure for figure in figures if figure.name == "return/last_trial")
    rows = read_metrics(metrics) if metrics.exists() else []  # nothing trains the random policy
    measured = {row["step"] / rows[-1]["step"]: row["return"] for row in rows if "return" in row}
    curve = [Figure(f"{CURVE}{share:.4g}", value, "return", n=last.n) for share, value in measured.items()]
    return [*curve, replace(last, name=f"{CURVE}1")] if rows else []


def chain_program(hardware: str, name: str) -> Program:
    """Returns a step of the paper's model: one chain over all devices for the ring, or one per device."""
    if name not in AGENTIC:
        raise UnknownNameError("method", name, tuple(AGENTIC))
    target, method, domain = machine(hardware), AGENTIC[name], DOMAINS["walker"]  # its widths hardly matter
    preset, steps = PRESETS["paper"], method.trajectories * domain.episode_steps
    chains = 1 if method.attention == "ring" else target.devices
    model = preset.model(domain, max_timestep=domain.episode_steps)
    stack = method.transformer(model.transformer, target.devices)
    model = replace(model, transformer=stack, dropout=0.0)

    def train_step(devices: tuple[Any, ...]) -> TrainStep:
        mesh = method.mesh(devices)
        padded = padded_length(steps, mesh.shape["ring"], "zigzag")
        return chain_step(model, preset.optimizer, chains, padded, mesh)

    return Program(
        name=f"{hardware} 350M {name}",
        machine=target,
        context=steps * TOKENS_PER_STEP,
        configuration=repr((model, chains)),
        train_step=train_step,
        arguments=(str(SCRIPT), "--fit", name, hardware),
    )


def memory_cells(hardware: str, output: Path) -> dict[str, str]:
    """Memory by method, from the machine's compiler, or kept on disk where that is not installed."""
    asked = machine(hardware).hardware
    programs = {name: chain_program(hardware, name) for name in AGENTIC}
    if asked.compiler_installed:
        with CellPool(output, 1, COMPILE_SECONDS) as pool:
            return {name: in_words(each.compiled(output, pool.run)) for name, each in programs.items()}
    say(
        f"the memory on {hardware} is not computed, as its compiler is not installed; "
        f"pip install 'agentic_ring[{asked.compiler_extra}]'"
    )
    kept = {name: each.kept(output) for name, each in programs.items()}
    return {name: in_words(finding) for name, finding in kept.items() if finding is not None}


def in_words(finding: Finding) -> str:
    """Such as "oom" or "12.3 GB"."""
    if finding.verdict == "does not fit":
        return "oom"
    return "error" if finding.needed is None else f"{finding.needed / 1e9:.1f} GB"
