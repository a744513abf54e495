"""Do 128 relabelled trajectories tell the task? Several training seeds, controls, and targets set before.

    python experiments/told_verdict.py --domain walker
    python experiments/told_verdict.py --domain point_mass_maze

trains the main job with each seed, evaluates it on the domain's tasks, none of which it trained on, and
prints for each target what was found. The unit is a training seed and a task; returns are normalised so that
random actions have 0 and the 95th percentile of the data 1. Evaluation has initial states and draws of
stored trajectories that the development of the recipe did not use. Run the same command again after an
interruption: what has finished stays.

New draws of the family of rewards are evaluated too, in ranks among the stored episodes. In the maze a task
is a hidden goal, which few stored trajectories meet, so that more of them must help. Returns are shares of
those of an oracle that knows the goal and the walls. Models that train on as many tokens, but on chains of
at most 32 trajectories, are compared with.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import rich
import tyro

from agentic_ring.data.domains import domain_named
from agentic_ring.data.rewards.tasks import POSITIONS
from agentic_ring.errors import ConfigError, check_at_least_one
from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.results.intervals import Interval, hierarchical_interval
from agentic_ring.results.results_file import Results, read_results, write_results
from agentic_ring.terminal import cli
from experiments.common.cells import RESULTS_FILE, run_cells
from experiments.common.targets import ABOVE_ZERO, Bound, NotMeasuredError, Target, judge
from experiments.exorl.told_presets import told_preset

ROOT = Path(__file__).parent.parent
CLAIM = "relabelled trajectories tell the model tasks that it never trained on"
GOAL_CLAIM = "the more relabelled trajectories, the better the model finds goals that it never trained on"
FIRST_ENVIRONMENT = 90_000
"""Seed of the evaluation's first environment; with another first training seed it is another one."""
JUDGED = {"walker": ("stand", "walk", "run", "flip"), "cheetah": ("run", "run_backward", "flip")}
"""Tasks whose gain must be shown one by one; own trials are judged on all tasks of the domain."""
UNSEEN = "unseen"
"""Name of the evaluation under many unseen reward functions, see ``evals/unseen_returns.py``."""
FEWER = 32
"""Most trajectories in the chains of the models of goals that are compared with."""
DomainName = Literal["walker", "cheetah", "point_mass_maze"]
Scores = Mapping[str, np.ndarray]
"""Name of a figure -> normalised returns [seeds, tasks]."""


@dataclass(frozen=True)
class VerdictConfig:
    """What decides the experiment's result."""

    domain: DomainName
    preset: Literal["demo", "small", "paper"]
    seeds: int
    first_seed: int
    updates: int | None

    def __post_init__(self) -> None:
        check_at_least_one(self, "seeds")
        if self.first_seed < 0:
            raise ConfigError(f"first_seed is {self.first_seed}; it must be 0 or more")


@dataclass(frozen=True)
class VerdictCell:
    """A training seed: the main job, or with a ``task`` or ``UNSEEN`` the evaluation of its model on them."""

    config: VerdictConfig
    seed: int
    task: str | None = None
    fewer: bool = False
    """Whether the model trains with at most ``FEWER`` trajectories."""

    def __str__(self) -> str:
        return f"{self.task or 'training'}{f', at most {FEWER}' if self.fewer else ''}, seed {self.seed}"

    def folder(self, output: Path) -> Path:
        """The folder of the run, or of the evaluation beside it."""
        run = f"seed{self.seed}{f'-at_most_{FEWER}' if self.fewer else ''}"
        return output / (run if self.task is None else f"{run}-{self.task}")

    def command(self, output: Path) -> list[str]:
        """Command of the script that trains or evaluates."""
        if self.task is None:
            first = domain_named(self.config.domain).tasks[0]
            flags = ["--preset", self.config.preset, "--seed", str(self.seed)]
            updates = self.config.updates
            if self.fewer:
                preset = told_preset(self.config.preset, domain_named(self.config.domain))
                share = preset.chains.steps / preset.with_trajectories(FEWER).chains.steps
                updates = round((updates or preset.updates) * share)
                flags += ["--num-trajectories", str(FEWER)]
            flags += [] if updates is None else ["--updates", str(updates)]
            script = ["experiments/exorl_at_ring.py", "--task", f"{self.config.domain}_{first}", *flags]
        else:
            run = replace(self, task=None).folder(output)
            if self.task == UNSEEN:
                script = ["evals/unseen_returns.py", "--run", str(run)]
                script += ["--contexts", "0", str(FEWER), "128"] if self.fewer else []
            else:
                task = f"{self.config.domain}_{self.task}"
                script = ["evals/dmc_returns.py", "--run", str(run), "--task", task]
            script += ["--first-seed", str(FIRST_ENVIRONMENT + 1000 * self.config.first_seed)]
        return [sys.executable, str(ROOT / script[0]), *script[1:], "--output", str(self.folder(output))]


def read_scores(cells: Sequence[VerdictCell], output: Path) -> dict[str, np.ndarray]:
    """Normalised returns [seeds, tasks] by the name of the figure; the tasks of a seed follow one another."""
    found = [_normalised(read_results(cell.folder(output) / RESULTS_FILE)) for cell in cells]
    seeds = len({cell.seed for cell in cells})
    return {name: np.reshape([each[name] for each in found], (seeds, -1)) for name in found[0]}


def _normalised(results: Results) -> dict[str, float]:
    low, high = (results.figure(f"return/{name}").value for name in ("random_policy", "data_p95"))
    return {f.name: (f.value - low) / (high - low) for f in results.figures if f.unit == "return"}


def read_unseen(
    cells: Sequence[VerdictCell], output: Path, unit: Literal["return", "rank"]
) -> dict[str, np.ndarray]:
    """Returns or ranks [seeds, reward functions] by the name of the figure."""
    found: dict[str, list[list[float]]] = {}
    for cell in cells:
        by_name: dict[str, list[float]] = {}
        for figure in read_results(cell.folder(output) / RESULTS_FILE).figures:
            name, separator, _ = figure.name.rpartition("/reward_")
            if separator and figure.unit == unit:
                by_name.setdefault(name, []).append(figure.value)
        for name, values in by_name.items():
            found.setdefault(name, []).append(values)
    return {name: np.array(values) for name, values in found.items()}


def goal_targets(most: int = 128) -> tuple[Target[Scores], ...]:
    """The targets of a domain in which tasks are goals."""

    def mean(plus: str, minus: str | None = None) -> "partial[Interval]":
        return partial(_mean, None, plus, minus)

    return (
        Target("training seeds", lambda scores: _count(scores["n0"]), Bound(least=3), Bound(least=5)),
        *(
            Target(
                f"{more} trajectories minus {fewer}",
                mean(f"n{more}", f"n{fewer}"),
                Bound(low=0.05),
                Bound(low=0.1),
            )
            for more, fewer in ((most, 32), (32, 4))
        ),
        Target(f"mean with {most}", mean(f"n{most}"), Bound(least=0.6), Bound(least=0.85)),
        *(
            Target(f"{most}, {words}: above no context", mean(name, "n0"), Bound(high=0.02), Bound(high=0.0))
            for name, words in (("zeroed", "rewards zeroed"), ("another", "another goal's rewards"))
        ),
        *(
            Target(
                f"{most} trajectories minus {fewer} of a model of at most {FEWER} (reported)",
                mean(f"n{most}", f"at_most_{FEWER}/n{fewer}"),
                Bound(),
                Bound(low=0.0),
            )
            for fewer in (FEWER, most)
        ),
        Target(
            "own trials, nothing stored: trial 8 minus 1 (reported)",
            mean("own_trials/trial_8", "own_trials/trial_1"),
            Bound(),
            Bound(low=0.0),
        ),
    )


def targets_of(tasks: Sequence[str], judged: Sequence[str], most: int = 128) -> tuple[Target[Scores], ...]:
    """The targets of a domain, whose scores are in the order of ``tasks``."""
    main = [tasks.index(name) for name in judged]

    def mean(*columns: int, plus: str, minus: str | None = None) -> "partial[Interval]":
        return partial(_mean, list(columns), plus, minus)

    told, none = f"return/n{most}", "return/n0"
    last = "own_trials/trial_4"
    return (
        Target("training seeds", lambda scores: _count(scores[told]), Bound(least=3), Bound(least=5)),
        *(
            Target(
                f"{tasks[index]}: {most} trajectories minus none",
                mean(index, plus=told, minus=none),
                Bound(low=0.1),
                Bound(low=0.2),
            )
            for index in main
        ),
        Target(f"mean with {most}", mean(*main, plus=told), Bound(least=0.75), Bound(least=0.9)),
        Target("mean with none", mean(*main, plus=none), Bound(most=0.55), Bound(most=0.55)),
        *(
            Target(
                f"{most}, rewards {name}: above no context",
                mean(*main, plus=f"control/{name}", minus=none),
                Bound(high=0.05),
                Bound(high=0.0),
            )
            for name in ("zeroed", "shuffled")
        ),
        Target(
            "no context minus another task's rewards",
            mean(*main, plus=none, minus="control/another_task"),
            ABOVE_ZERO,
            Bound(low=0.0),
        ),
        Target(
            "own trials, nothing stored: trial 4 minus 1, all tasks",
            mean(*range(len(tasks)), plus=last, minus="own_trials/trial_1"),
            Bound(low=0.0),
            Bound(low=0.1),
        ),
        Target(
            f"unseen reward functions, rank: {most} trajectories minus none",
            partial(_mean, None, f"rank/n{most}", "rank/n0"),
            Bound(low=0.1),
            Bound(low=0.2),
        ),
        Target(
            "unseen reward functions, rank: own trial 4 minus 1",
            partial(_mean, None, "rank/own_trials/trial_4", "rank/own_trials/trial_1"),
            Bound(low=0.0),
            Bound(low=0.1),
        ),
    )


def _mean(columns: list[int] | None, plus: str, minus: str | None, scores: Scores) -> Interval:
    """Mean over seeds and tasks, with its hierarchical interval; an error where a figure is missing."""
    if missing := {plus, minus or plus} - scores.keys():
        raise NotMeasuredError(f"{missing} was not measured")
    quantity = scores[plus] - (0 if minus is None else scores[minus])
    chosen = quantity if columns is None else quantity[:, columns]
    return hierarchical_interval(chosen[None], lambda drawn: drawn[..., 0, :, :].mean((-2, -1)))


def _count(scores: np.ndarray) -> Interval:
    return Interval(float(len(scores)), None, None, 1, "")


def main(
    domain: DomainName = "walker",
    preset: Literal["demo", "small", "paper"] = "demo",
    seeds: Annotated[int, tyro.conf.arg(metavar="N")] = 3,
    first_seed: Annotated[int, tyro.conf.arg(metavar="SEED")] = 0,
    updates: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> None:
    """Trains and evaluates the main job with several seeds, and prints the verdict.

    Args:
      domain: Domain whose tasks are told.
      preset: Size of the runs, see experiments/exorl_at_ring.py.
      seeds: Number of training seeds.
      first_seed: The first of them; a recipe that was changed after a verdict is judged on others.
      updates: Number of optimiser updates of each. Default: the preset's.
      resume: Continue the experiment in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the experiment. Default: runs/told_verdict-DOMAIN-PRESET.
    """
    config, goals = VerdictConfig(domain, preset, seeds, first_seed, updates), domain in POSITIONS
    tasks = () if goals else domain_named(domain).tasks
    directory = output or Path("runs") / f"told_verdict-{domain}-{preset}"
    trained = [VerdictCell(config, seed) for seed in range(first_seed, first_seed + seeds)]
    evaluated = [replace(cell, task=task) for cell in trained for task in tasks]
    unseen = [replace(cell, task=UNSEEN) for cell in trained]
    fewer = [replace(cell, fewer=True) for cell in trained if goals]
    fewer_unseen = [replace(cell, task=UNSEEN) for cell in fewer]
    stages = Stages()
    with enter_directory(directory, config, resume):
        stages.keep_in(directory)
        with stages.stage("training"):
            run_cells("training seeds", [*trained, *fewer], directory, workers=1)
        with stages.stage("evaluation"):
            run_cells("evaluations", [*evaluated, *unseen, *fewer_unseen], directory, workers=1)
        if goals:
            returns = read_unseen(unseen, directory, "return")
            at_most = read_unseen(fewer_unseen, directory, "return")
            returns |= {f"at_most_{FEWER}/{name}": each for name, each in at_most.items()}
            scores = {name: each / returns["oracle"].mean() for name, each in returns.items()}
            verdict = judge(GOAL_CLAIM, goal_targets(), scores)
        else:
            scores = read_scores(evaluated, directory) | read_unseen(unseen, directory, "rank")
            verdict = judge(CLAIM, targets_of(tasks, JUDGED[domain]), scores)
        results = Results.of_this_process(asdict(config), stages.seconds, verdict.figures())
        write_results(directory / RESULTS_FILE, results)
    rich.print(verdict.table())
    print(verdict)
    print(f"written to {directory}: results.json, and a folder for each seed and task")


if __name__ == "__main__":
    cli.run(main)
