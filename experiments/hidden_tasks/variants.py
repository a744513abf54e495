"""Variants of the model in the experiment on trained context length: presets, training and evaluation.

Each variant with a training seed is a cell of the experiment, computed in a process of its own.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import gcd
from pathlib import Path

import jax
import numpy as np

from agentic_ring.data.chain_loader import ChainPipeline
from agentic_ring.data.hidden_tasks.cue_chains import CueChainConfig, CueChains
from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.family import Family, RewardKind
from agentic_ring.data.hidden_tasks.ranked_trials import RankingConfig, rank_trials
from agentic_ring.data.store import Scaling
from agentic_ring.files.run_folder import Stages, only_writer, read_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, action_loss
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.terminal.progress import say
from agentic_ring.training.loop import read_metrics, train
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from experiments.common.cells import RESULTS_FILE
from experiments.common.launch import train_stages, training_outputs
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
FIRST_SHARE = 0.3
"""Share of a variant's tokens in its first stage."""
PART_TOKENS = 1024
"""Tokens whose gradients are computed at a time on a CPU, or one chain. Their activations stay in the cache
of a core: with n = 4, parts of 8,192 tokens take 1.6 times as long."""


@dataclass(frozen=True)
class Variant:
    """One kind of model in the comparison, trained in two stages.

    The first stage has no partly successful trials: it teaches to tell success from failure, the second one
    to approach from near misses.

    Attributes:
      name: as in ``verdict``; one with another setting is named after both, such as n4_one_cue.
      trials: number of trials n in a chain, and in context.
      first_trials: number of trials in a chain of the first stage; None is ``trials``.
      first_cues: numbers of cues in the first stage; None is ``cues``.
      shows_goal, cues, misleading: see ``CueChainConfig``.
    """

    name: str
    trials: int
    first_trials: int | None = None
    first_cues: tuple[int, ...] | None = None
    shows_goal: bool = False
    cues: tuple[int, ...] = CueChainConfig.cues
    misleading: float = CueChainConfig.misleading


@dataclass(frozen=True)
class Preset:
    """A size of the experiment."""

    name: str
    variants: tuple[Variant, ...]
    """The models; the longest to train come first."""
    seeds: int
    """Number of training seeds."""
    tokens: int
    """Number of tokens that each variant is trained on."""
    tokens_per_update: int
    """Tokens of a batch, rounded to whole chains."""
    transformer: TransformerConfig
    optimizer: OptimizerConfig
    """Settings of each stage; a short stage warms up in an eighth of its updates."""
    checkpoint_every: int
    """Updates between two checkpoints."""
    explored: int = 200_000
    """Number of explored trials, where the data folder has none."""
    ranking: RankingConfig = field(default_factory=RankingConfig)
    """How explored trials are ranked for each goal."""
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    """Size of the rollouts; each training seed has tasks of its own."""

    def model(self, family: Family) -> AgenticTransformerConfig:
        """The configuration of the model, the same for all variants."""
        return AgenticTransformerConfig(
            self.transformer,
            family.observation_dim,
            family.action_dim,
            max_timestep=family.decisions,
            paired_tokens=True,
            action_modes=6,
        )

    def training(self, trials: int, share: float, family: Family, seed: int) -> TrainConfig:
        """How to train on chains of so many trials, on one device with this share of a variant's tokens."""
        chain_tokens = trials * family.decisions * self.model(family).tokens_per_step
        batch_size = max(1, round(self.tokens_per_update / chain_tokens))
        steps = max(1, round(share * self.tokens / (batch_size * chain_tokens)))
        on_cpu = jax.default_backend() == "cpu"
        parts = gcd(batch_size, max(1, batch_size * chain_tokens // PART_TOKENS)) if on_cpu else 1
        warmup = self.optimizer.warmup_of(steps)
        optimizer = replace(self.optimizer, warmup_steps=warmup, accumulation=parts)
        return TrainConfig(steps, batch_size, optimizer, self.checkpoint_every, log_every=10, seed=seed)


N4, N32, N128 = Variant("n4", 4), Variant("n32", 32), Variant("n128", 128, first_trials=32)
ORACLE = Variant("oracle", 1, shows_goal=True)
_DEMO = Preset(
    name="demo",
    variants=(N128, N32, N4, ORACLE),
    seeds=1,
    tokens=8_000_000,
    tokens_per_update=8192,
    transformer=TransformerConfig(
        width=64, layers=3, heads=2, ffn_width=128, rope_theta=1e6, remat="attention"
    ),
    optimizer=OptimizerConfig(
        learning_rate=2e-3, warmup_steps=50, clip_norm=1.0, beta2=0.95, muon_learning_rate=0.02
    ),
    checkpoint_every=100,
)
PRESETS = {
    # 2 cores, 16 minutes.
    "demo": _DEMO,
    # 2 cores, about 3 hours; one process a core.
    "full": replace(
        _DEMO,
        name="full",
        variants=(
            *(N128, N32, Variant("n16", 16), N4),
            *(Variant("n4_one_cue", 4, cues=(1,)), Variant("n1", 1), ORACLE),
        ),
        seeds=5,
        tokens=14_000_000,
        checkpoint_every=250,
    ),
    # What a body other than point_mass must show; 2 cores, about 4 hours. On reacher a model that is never
    # misled believes wrong rewards too readily, and one that begins with few cues earns more with right
    # rewards over what it earns with corrupted ones. 32 tasks are too few to measure the little that these
    # change.
    "body": replace(
        _DEMO,
        name="body",
        variants=(
            *(replace(each, first_trials=32, first_cues=(1, 2, 4), misleading=0.125) for each in (N128, N32)),
            ORACLE,
        ),
        seeds=3,
        tokens=28_000_000,
        checkpoint_every=250,
        rollouts=RolloutConfig(tasks=128),
    ),
}
TASK_SEEDS = 10_000
"""Distance of the first tasks of consecutive training seeds."""


@dataclass(frozen=True)
class VariantStage:
    """Training on chains of one kind, from the weights of the stage before."""

    chains: CueChainConfig
    training: TrainConfig


@dataclass(frozen=True)
class VariantConfig:
    """Everything that decides the result of a variant and training seed; ``store`` is a path."""

    variant: str
    preset: str
    store: str
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
    last = CueChainConfig(
        family.name,
        variant.trials,
        variant.cues,
        misleading=variant.misleading,
        shows_goal=variant.shows_goal,
        reward_kind=reward_kind,
        seed=2 * seed + 1,
    )
    trials, cues = variant.first_trials or variant.trials, variant.first_cues or variant.cues
    first = replace(last, trials=trials, cues=cues, graded=0.0, seed=2 * seed)
    stages = tuple(
        VariantStage(chains, preset.training(chains.trials, share, family, seed))
        for chains, share in ((first, FIRST_SHARE), (last, 1 - FIRST_SHARE))
    )
    return VariantConfig(
        variant=variant.name,
        preset=preset.name,
        store=str(store.path),
        ranking=preset.ranking,
        scaling=scaling,
        model=preset.model(family),
        stages=stages,
        evaluation=replace(preset.rollouts, first_seed=TASK_SEEDS * (seed + 1)),
    )


def train_variant(config: VariantConfig, directory: Path) -> TrainedModel:
    """Trains a variant on one device in its stages, from the newest checkpoint if there is one."""
    mesh, model = make_mesh(MeshShape(ring=1), jax.devices()[:1]), Model(config.model)

    def train_stage(number: int, folder: Path, params: Params | None) -> Params:
        stage = config.stages[number]
        say(f"stage {number + 1} of {len(config.stages)}: chains of {stage.chains.trials} trials")
        with training_outputs(folder, config) as outputs, ExplorationStore.open(config.store) as store:
            ranked = rank_trials(store, config.ranking)
            chains = CueChains(store, ranked, stage.chains, config.scaling, ring=1)
            return train(
                stage.training,
                model,
                action_loss,
                ChainPipeline(chains, chains.plan, stage.training.batch_size, mesh),
                mesh,
                *outputs,
                tokens_per_place=config.model.tokens_per_step,
                start=None if params is None else lambda: params,
            ).params

    params = train_stages(directory, len(config.stages), train_stage)
    return TrainedModel(model, params, mesh, config.scaling, config.stages[-1].chains)


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
