"""Returns of models trained on chains of 1 to 128 trials, in tasks that only rewards reveal.

    python experiments/in_context.py --family point_mass --preset demo

explores the family, trains each variant and seed in a process of its own, rolls them out in tasks that
training never had, online and behind stored trials, and prints which of the pre-registered targets are met.
Run the same command again after an interruption: finished variants are kept, stopped ones continue.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import rich
import tyro

from agentic_ring.data.hidden_tasks.bodies import FAMILIES
from agentic_ring.data.hidden_tasks.cue_chains import CueChains, measure_cue_scaling
from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.family import RewardKind
from agentic_ring.data.hidden_tasks.ranked_trials import rank_trials
from agentic_ring.data.store import data_root
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Stages, enter_directory, only_writer
from agentic_ring.provenance import usable_cores
from agentic_ring.terminal import cli
from data_prep.explore import ExploreConfig, exploration_path, explore
from experiments.common.cells import run_cells
from experiments.hidden_tasks.report import all_returns, write_report
from experiments.hidden_tasks.variants import (
    PRESETS,
    Preset,
    VariantCell,
    VariantConfig,
    resolve_variant,
    run_cell,
)
from experiments.hidden_tasks.verdict import judge


@dataclass(frozen=True)
class ExperimentConfig:
    """What all variants have in common."""

    family: str
    preset: str
    pay: RewardKind
    store: str


def prepare_exploration(preset: Preset, family: str, root: Path) -> Path:
    """The explored and ranked trials of the family below ``root``; explores it if there are none."""
    path = exploration_path(root, family)
    with only_writer(path.parent, wait=True):
        if not path.exists():
            explore(ExploreConfig(family, trials=preset.explored, data=root))
        with ExplorationStore.open(path) as store:
            rank_trials(store, preset.ranking)
    return path


def prepare_cells(
    preset: Preset, seeds: int, store_path: Path, output: Path, reward_kind: RewardKind = "dense"
) -> dict[VariantCell, VariantConfig]:
    """Writes the configuration of every variant, seed by seed, so that an early stop leaves whole seeds.

    Chains that do not go together with the explored trials are refused before anything is written.
    """
    with ExplorationStore.open(store_path) as store:
        scaling, ranked = measure_cue_scaling(store), rank_trials(store, preset.ranking)
        cells = {
            VariantCell(variant.name, seed): resolve_variant(
                preset, variant, store, seed, scaling, reward_kind
            )
            for seed in range(seeds)
            for variant in preset.variants
        }
        for config in cells.values():
            for stage in config.stages:
                CueChains(store, ranked, stage.chains, scaling, ring=1)
    for cell, config in cells.items():
        with enter_directory(cell.folder(output), config, resume=True):
            pass  # the cell's process enters it again
    return cells


def main(
    family: Annotated[
        Literal[tuple(FAMILIES)],  # pyright: ignore[reportInvalidTypeForm]
        tyro.conf.arg(metavar="NAME"),
    ] = "point_mass",
    preset: Annotated[
        Literal[tuple(PRESETS)],  # pyright: ignore[reportInvalidTypeForm]
        tyro.conf.arg(metavar="NAME"),
    ] = "demo",
    pay: RewardKind = "dense",
    seeds: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    data: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    workers: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    cell: Annotated[tuple[str, int] | None, cli.optional_flag(metavar="VARIANT SEED")] = None,
) -> None:
    """Trains models on chains of different lengths, rolls them out and prints the verdict.

    Args:
      family: Body of the tasks.
      preset: Size of the experiment: demo (chains of 4, 32 and 128 trials, two cores, 16 minutes), full
        (chains of 1 to 128 trials, 5 training seeds, two cores, hours) or body (what a body other than
        point_mass must show: chains of 32 and 128 trials, 3 seeds, two cores, 4 hours).
      pay: Reward of a decision: one that falls with the error, 1 or 0, or a coin whose probability of 1 is
        the first.
      seeds: Number of training seeds. Default: the preset's.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run. Default: runs/in_context-FAMILY-PRESET.
      data: Folder of the data. Default: $AGENTIC_RING_DATA, or else data.
      workers: Number of variants at a time. Default: one per core.
      cell: Only compute one prepared variant, given by its name and training seed.
    """
    chosen = PRESETS[preset]
    suffix = "" if pay == "dense" else f"-{pay}"
    directory = output or Path("runs") / f"in_context-{family}-{preset}{suffix}"
    if cell is not None:
        run_cell(VariantCell(*cell), directory)
        return
    seeds = chosen.seeds if seeds is None else seeds
    workers = usable_cores() if workers is None else workers
    if workers < 1 or seeds < 1:
        raise ConfigError(f"workers is {workers} and seeds {seeds}; both must be at least 1")
    stages = Stages()
    with stages.stage("data"):
        store_path = prepare_exploration(chosen, family, data or data_root())
    config = ExperimentConfig(family, preset, pay, str(store_path))
    with enter_directory(directory, config, resume):
        stages.keep_in(directory)
        cells = prepare_cells(chosen, seeds, store_path, directory, pay)
        share = {"NPROC": str(max(1, usable_cores() // workers))}
        with stages.stage("variants"):
            run_cells("variants", [*cells], directory, workers, share)
        returns = all_returns(cells, directory)
        verdict = judge(returns, family, pay)
        described = {**asdict(config), "seeds": seeds, "variants": [asdict(each) for each in chosen.variants]}
        write_report(directory, described, stages.seconds, returns, verdict)
        rich.print(verdict.table())
        print(verdict)
        print(f"written to {directory}: results.json, trials.csv, plots and variants")


if __name__ == "__main__":
    cli.run(main)
