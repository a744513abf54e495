"""The arms of the comparison: each model's configuration and training, from explored trials to weights."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainPipeline
from agentic_ring.data.families import Pay, Region
from agentic_ring.data.families.cue_chains import CueChainConfig, CueChains
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.ranked_trials import RankingConfig, rank_trials
from agentic_ring.data.scaling import Scaling
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.model import Model, Params
from agentic_ring.terminal.progress import say
from agentic_ring.training.loop import train
from agentic_ring.training.losses import action_loss
from agentic_ring.training.train_config import TrainConfig
from evals.in_context.rollouts import Condition, CueRolloutConfig
from evals.in_context.verdict import CUES
from experiments.common.training_outputs import train_stages, training_outputs
from experiments.cue_runs.presets import Arm, CuePreset

TASK_SEEDS = 10_000
"""Distance of the first tasks of consecutive training seeds."""


@dataclass(frozen=True)
class ArmStage:
    """Training on chains of one kind, from the weights of the stage before."""

    chains: CueChainConfig
    training: TrainConfig


@dataclass(frozen=True)
class ArmConfig:
    """Everything that decides the result of an arm and training seed."""

    arm: str
    preset: str
    family: str
    store: str
    """Path of the explored trials."""
    ranking: RankingConfig
    mesh: MeshShape
    scaling: Scaling
    model: AgenticTransformerConfig
    stages: tuple[ArmStage, ...]
    evaluation: CueRolloutConfig
    """The main rollout; tasks of another training seed are others."""
    cues: tuple[int, ...]
    """Numbers of cues of all rollouts."""
    online_controls: tuple[Condition, ...]
    """See ``CuePreset``."""

    @property
    def chains(self) -> CueChainConfig:
        """The chains of the last stage."""
        return self.stages[-1].chains

    def rollout(self, cues: int, region: Region) -> CueRolloutConfig:
        """The rollout in tasks with this number of cues, with goals in these regions."""
        return replace(self.evaluation, cues=cues, region=region)


def arm_mesh(preset: CuePreset) -> Mesh:
    """The mesh of one arm: a ring of the preset's size, and one chain at a time on it."""
    return make_mesh(MeshShape(ring=preset.ring), jax.devices()[: preset.ring])


def resolve_arm(
    preset: CuePreset, arm: Arm, store: ExplorationStore, seed: int, scaling: Scaling, pay: Pay = "dense"
) -> ArmConfig:
    """Everything that decides the result of an arm; ``scaling`` is that of the store."""
    family, mesh = store.family, arm_mesh(preset)
    stages = tuple(
        ArmStage(
            CueChainConfig(
                family.name,
                stage.trials,
                stage.cues or arm.cues,
                action_repeat=stage.action_repeat,
                graded=arm.graded if number else 0.0,
                decoys=arm.decoys,
                misleading=arm.misleading,
                first_leader_weight=arm.first_leader_weight,
                loss=arm.loss,
                told=arm.told,
                pay=pay,
                seed=len(arm.stages()) * seed + number,
            ),
            preset.training(stage, family, mesh, seed),
        )
        for number, stage in enumerate(arm.stages())
    )
    return ArmConfig(
        arm=arm.name,
        preset=preset.name,
        family=family.name,
        store=str(store.path),
        ranking=preset.ranking,
        mesh=MeshShape(**mesh.shape),
        scaling=scaling,
        model=preset.model(family),
        stages=stages,
        evaluation=CueRolloutConfig(
            family.name,
            CUES,
            tasks=preset.tasks,
            first_seed=TASK_SEEDS * (seed + 1),
            trials=preset.trials,
            measured=preset.measured,
            pay=pay,
        ),
        cues=preset.cues,
        online_controls=preset.online_controls,
    )


def train_arm(config: ArmConfig, mesh: Mesh, directory: Path) -> Params:
    """Trains an arm in its stages, from the newest checkpoint if there is one; returns its weights."""
    return train_stages(directory, len(config.stages), partial(_train_stage, config, mesh))


def _train_stage(config: ArmConfig, mesh: Mesh, number: int, folder: Path, params: Params | None) -> Params:
    stage = config.stages[number]
    repeat = stage.chains.action_repeat
    steps = "" if repeat == 1 else f", steps of {repeat} decisions"
    say(f"stage {number + 1} of {len(config.stages)}: chains of {stage.chains.trials} trials{steps}")
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
