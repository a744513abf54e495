"""Returns of models trained on chains of 1 to 128 trials, in tasks that only rewards reveal.

    python experiments/in_context.py --family point_mass --preset demo

explores the family, trains each arm and seed in a process of its own, rolls them out in tasks that training
never had, online and behind stored trials, and prints which of the pre-registered targets are met. Run the
same command again after an interruption: finished arms are kept, stopped ones continue.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import rich
import tyro

from agentic_ring.data.families import FAMILIES, Pay, family_named
from agentic_ring.data.families.cue_chains import CueChains, measure_cue_scaling
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.ranked_trials import rank_trials
from agentic_ring.data.store import data_root
from agentic_ring.errors import ConfigError
from agentic_ring.files.folder_lock import only_writer
from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.provenance import usable_cores
from agentic_ring.terminal import cli
from data_prep.explore import ExploreConfig, exploration_path, explore
from evals.in_context.verdict import judge
from experiments.common.cells import run_with_progress
from experiments.cue_runs.arms import ArmConfig, resolve_arm
from experiments.cue_runs.cells import CueCell, prepare_cell, run_cell
from experiments.cue_runs.evaluation import LONGEST, all_returns
from experiments.cue_runs.presets import CUE_PRESETS, CuePreset
from experiments.cue_runs.report import differences_table, leak_figures, write_report


@dataclass(frozen=True)
class ExperimentConfig:
    """What all arms have in common."""

    family: str
    preset: str
    pay: Pay
    store: str


def prepare_exploration(preset: CuePreset, family: str, root: Path) -> Path:
    """The explored and ranked trials of the family below ``root``; explores it if there are none."""
    path = exploration_path(root, family)
    with only_writer(path.parent, wait=True):
        if not path.exists():
            explore(ExploreConfig(family, trials=preset.explored, data=root))
        with ExplorationStore.open(path) as store:
            rank_trials(store, preset.ranking)
    return path


def prepare_cells(
    preset: CuePreset, seeds: int, store_path: Path, output: Path, pay: Pay = "dense"
) -> dict[CueCell, ArmConfig]:
    """Writes the configuration of every arm, seed by seed, so that an early stop leaves whole seeds.

    Raises:
      ConfigError: the chains do not go together with the explored trials.
    """
    with ExplorationStore.open(store_path) as store:
        scaling, ranked = measure_cue_scaling(store), rank_trials(store, preset.ranking)
        cells = {
            CueCell(arm.name, seed): resolve_arm(preset, arm, store, seed, scaling, pay)
            for seed in range(seeds)
            for arm in preset.arms
        }
        for config in cells.values():
            for stage in config.stages:
                CueChains(store, ranked, stage.chains, scaling, preset.ring)
    for cell, config in cells.items():
        prepare_cell(cell, config, output)
    return cells


def main(
    family: Annotated[
        Literal[tuple(FAMILIES)],  # pyright: ignore[reportInvalidTypeForm]
        tyro.conf.arg(metavar="NAME"),
    ] = "point_mass",
    preset: Annotated[
        Literal[tuple(CUE_PRESETS)],  # pyright: ignore[reportInvalidTypeForm]
        tyro.conf.arg(metavar="NAME"),
    ] = "demo",
    pay: Pay = "dense",
    seeds: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    data: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    workers: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    cell: Annotated[tuple[str, int] | None, cli.optional_flag(metavar="ARM SEED")] = None,
) -> None:
    """Trains models on chains of different lengths, rolls them out and prints the verdict.

    Args:
      family: Body of the tasks.
      preset: Size of the experiment: demo (chains of 4, 32 and 128 trials, two cores, 16 minutes), full
        (chains of 1 to 128 trials, 5 training seeds, two cores, hours), body (what a body other than
        point_mass must show: chains of 32 and 128 trials, 3 seeds, two cores, 4 hours), ablations (settings
        of the training data, at n = 128, two cores, an hour) or long (128 trials of 256 decisions, 65,536
        tokens, on a ring of 8, two cores, hours).
      pay: How a decision is paid: with a reward that falls with the error, with 1 or 0, or by a coin whose
        odds are the first.
      seeds: Number of training seeds. Default: the preset's.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run. Default: runs/in_context-FAMILY-PRESET.
      data: Folder of the data. Default: $AGENTIC_RING_DATA, or else data.
      workers: Number of arms at a time. Default: one per core.
      cell: Only compute one prepared arm, given by its name and training seed.
    """
    chosen = CUE_PRESETS[preset]
    name = replace(family_named(family), decisions=chosen.decisions).name
    suffix = "" if pay == "dense" else f"-{pay}"
    directory = output or Path("runs") / f"in_context-{name}-{preset}{suffix}"
    if cell is not None:
        run_cell(CueCell(*cell), directory)
        return
    if chosen.ring > 1:
        simulate_cpu_devices(chosen.ring)
    seeds = chosen.seeds if seeds is None else seeds
    workers = usable_cores() if workers is None else workers
    if workers < 1 or seeds < 1:
        raise ConfigError(f"workers is {workers} and seeds {seeds}; both must be at least 1")
    stages = Stages()
    with stages.stage("data"):
        store_path = prepare_exploration(chosen, name, data or data_root())
    config = ExperimentConfig(name, preset, pay, str(store_path))
    with enter_directory(directory, config, resume):
        stages.keep_in(directory)
        cells = prepare_cells(chosen, seeds, store_path, directory, pay)
        share = {"NPROC": str(max(1, usable_cores() // workers))}
        with stages.stage("arms"):
            run_with_progress("arms", [*cells], directory, workers, share)
        returns = all_returns(cells, directory)
        verdict = judge(returns, name, pay)
        described = {**asdict(config), "seeds": seeds, "arms": [asdict(arm) for arm in chosen.arms]}
        with stages.stage("leak probe"), ExplorationStore.open(store_path) as store:
            ranked = rank_trials(store, chosen.ranking)
            leaks = leak_figures(store, ranked, cells[CueCell(LONGEST, 0)].chains)
        write_report(directory, name, described, stages.seconds, returns, verdict, leaks)
        rich.print(differences_table(returns))
        rich.print(verdict.table())
        print(verdict)
        print(f"written to {directory}: results.json, trials.csv, returns.npz, plots and arms")


if __name__ == "__main__":
    cli.run(main)
