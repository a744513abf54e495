"""Variants of the comparison with a training seed each: configuration, training and evaluation.

Each is a cell of the experiment, computed in a process of its own.
"""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainPipeline
from agentic_ring.data.families.cue_chains import CueChainConfig, CueChains
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.family import RewardKind
from agentic_ring.data.families.ranked_trials import RankingConfig, rank_trials
from agentic_ring.data.scaling import Scaling
from agentic_ring.files.run_folder import Stages, only_writer, read_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.model import Model, Params
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.terminal.progress import say
from agentic_ring.training.loop import read_metrics, train
from agentic_ring.training.optimizer import TrainConfig
from agentic_ring.training.train_step import action_loss
from experiments.common.cells import RESULTS_FILE
from experiments.common.training_outputs import train_stages, training_outputs
from experiments.hidden_tasks.presets import FIRST_SHARE, Preset, Variant
from experiments.hidden_tasks.rollouts import (
    RolloutConfig,
    TrainedModel,
    case_returns,
    kept_returns,
    returns_path,
    variant_cases,
)
from experiments.hidden_tasks.verdict import Case

SCRIPT = Path(__file__).parents[1] / "in_context.py"
TASK_SEEDS = 10_000
"""Distance of the first tasks of consecutive training seeds."""


@dataclass(frozen=True)
class VariantStage:
    """Training on chains of one kind, from the weights of the stage before."""

    chains: CueChainConfig
    training: TrainConfig


@dataclass(frozen=True)
class VariantConfig:
    """Everything that decides the result of a variant and training seed."""

    variant: str
    preset: str
    store: str
    """Path of the explored trials."""
    ranking: RankingConfig
    scaling: Scaling
    model: AgenticTransformerConfig
    stages: tuple[VariantStage, ...]
    evaluation: RolloutConfig
    """Size of the rollouts; tasks of another training seed are others."""


@dataclass(frozen=True)
class VariantCell:
    """A variant and a training seed."""

    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.variant} seed {self.seed}"

    def folder(self, output: Path) -> Path:
        """The cell's folder."""
        return output / "variants" / f"{self.variant}-seed{self.seed}"

    def command(self, output: Path) -> list[str]:
        """Command of the process that computes the cell."""
        return [sys.executable, str(SCRIPT), "--cell", self.variant, str(self.seed), "--output", str(output)]


def resolve_variant(
    preset: Preset,
    variant: Variant,
    store: ExplorationStore,
    seed: int,
    scaling: Scaling,
    reward_kind: RewardKind = "dense",
) -> VariantConfig:
    """Everything that decides the result of a variant; ``scaling`` is that of the store."""
    family = store.family
    kinds = (
        (variant.first_trials or variant.trials, FIRST_SHARE, variant.first_cues or variant.cues, 0.0),
        (variant.trials, 1 - FIRST_SHARE, variant.cues, CueChainConfig.graded),
    )
    stages = tuple(
        VariantStage(
            CueChainConfig(
                family.name,
                trials,
                cues,
                graded=graded,
                misleading=variant.misleading,
                shows_goal=variant.shows_goal,
                reward_kind=reward_kind,
                seed=len(kinds) * seed + number,
            ),
            preset.training(trials, share, family, seed),
        )
        for number, (trials, share, cues, graded) in enumerate(kinds)
    )
    return VariantConfig(
        variant=variant.name,
        preset=preset.name,
        store=str(store.path),
        ranking=preset.ranking,
        scaling=scaling,
        model=preset.model(family),
        stages=stages,
        evaluation=RolloutConfig(preset.tasks, TASK_SEEDS * (seed + 1), preset.trials, preset.measured),
    )


def train_variant(config: VariantConfig, directory: Path) -> TrainedModel:
    """Trains a variant on one device in its stages, from the newest checkpoint if there is one."""
    mesh = make_mesh(MeshShape(ring=1), jax.devices()[:1])
    params = train_stages(directory, len(config.stages), partial(_train_stage, config, mesh))
    return TrainedModel(Model(config.model), params, mesh, config.scaling, config.stages[-1].chains)


def _train_stage(
    config: VariantConfig, mesh: Mesh, number: int, folder: Path, params: Params | None
) -> Params:
    stage = config.stages[number]
    say(f"stage {number + 1} of {len(config.stages)}: chains of {stage.chains.trials} trials")
    with (
        training_outputs(folder, config) as outputs,
        ExplorationStore.open(config.store) as store,
    ):
        chains = CueChains(
            store, rank_trials(store, config.ranking), stage.chains, config.scaling, mesh.shape["ring"]
        )
        return train(
            stage.training,
            Model(config.model),
            action_loss,
            ChainPipeline(chains, chains.plan, stage.training.batch_size, mesh),
            mesh,
            *outputs,
            tokens_per_place=config.model.tokens_per_step,
            start=None if params is None else lambda: params,
        ).params


def run_cell(cell: VariantCell, output: Path) -> None:
    """Trains and rolls out a cell in this process, by the ``config.json`` in its folder.

    Raises:
      DataError: the cell was not prepared.
      CheckpointError: the folder's checkpoints are of another configuration.
    """
    directory = cell.folder(output)
    config = read_config(directory, VariantConfig)
    with only_writer(directory):
        stages = Stages()
        stages.keep_in(directory)
        with stages.stage("training"):
            model = train_variant(config, directory)
        with stages.stage("evaluation"), ExplorationStore.open(config.store) as store:
            returns = {
                case: kept_returns(
                    returns_path(directory, case),
                    config.evaluation.tasks,
                    partial(case_returns, model, config.evaluation, case, store),
                )
                for case in variant_cases(config.variant, store.family)
            }
        results = Results.of_this_process(asdict(config), stages.seconds, _figures(directory, returns))
        write_results(directory / RESULTS_FILE, results)


def _figures(directory: Path, returns: dict[Case, np.ndarray]) -> list[Figure]:
    rows = read_metrics(directory / "stage2" / "metrics.jsonl")
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
