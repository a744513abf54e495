"""Sizes of the experiment on trained context length: demo, full, body, ablations and long."""

from dataclasses import dataclass, field, replace
from math import gcd
from typing import Literal

from jax.sharding import Mesh

from agentic_ring.data.families import Family
from agentic_ring.data.families.cue_chains import CueChainConfig
from agentic_ring.data.families.family import TRIAL_DECISIONS
from agentic_ring.data.families.ranked_trials import RankingConfig
from agentic_ring.errors import UnknownNameError
from agentic_ring.mesh import batch_shards, rows_per_shard
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig
from agentic_ring.training.train_config import TrainConfig
from evals.in_context.rollouts import Condition
from evals.in_context.verdict import CUES

FIRST_SHARE = 0.3
"""Share of an arm's tokens in its first stage, without graded trials, where the arm does not say more."""
PART_TOKENS = 1024
"""Tokens of a device whose gradients are computed at a time on a CPU, or one chain. Their activations stay in
the cache of a core: with n = 4, parts of 8,192 tokens take 1.6 times as long."""


@dataclass(frozen=True)
class Stage:
    """A part of an arm's training.

    Attributes:
      trials: number of trials in a chain.
      share: share of the arm's tokens.
      action_repeat: number of decisions that one step of a chain spans; see ``CueChainConfig``.
      rate: factor on the preset's learning rates; at full rate a few updates undo what is learned.
      cues: numbers of cues of the tasks; None is the arm's.
    """

    trials: int
    share: float
    action_repeat: int = 1
    rate: float = 1.0
    cues: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Arm:
    """One kind of model in the comparison.

    Attributes:
      name: as in ``evals.in_context.verdict``; one that differs from such an arm in a setting is named after
        both, such as n128_unweighted, and compared with it.
      trials: number of trials n in a chain, and in context.
      earlier: the stages before the last one; empty is one stage of ``trials``.
      last_rate: factor on the learning rates in the last stage.
      told, cues, graded, decoys, misleading, first_leader_weight, loss: see ``CueChainConfig``. The first
        stage has no graded trials: it teaches to tell success from failure, later ones to approach from near
        misses.
    """

    name: str
    trials: int
    earlier: tuple[Stage, ...] = ()
    last_rate: float = 1.0
    told: bool = False
    cues: tuple[int, ...] = CueChainConfig.cues
    graded: float = CueChainConfig.graded
    decoys: float = CueChainConfig.decoys
    misleading: float = CueChainConfig.misleading
    first_leader_weight: float = CueChainConfig.first_leader_weight
    loss: Literal["leaders", "all"] = CueChainConfig.loss

    def stages(self) -> list[Stage]:
        """All stages; the last one has chains of ``trials``."""
        earlier = self.earlier or (Stage(self.trials, FIRST_SHARE),)
        share = 1 - sum(stage.share for stage in earlier)
        return [*earlier, Stage(self.trials, share, rate=self.last_rate)]


@dataclass(frozen=True)
class CuePreset:
    """A size of the experiment.

    Attributes:
      name: as on the command line.
      arms: the models; the longest to train come first.
      seeds: number of training seeds.
      tokens: number of tokens that each arm is trained on.
      tokens_per_update: tokens of a batch, rounded to whole chains.
      transformer: the stack.
      optimizer: settings of each stage; a short stage warms up in an eighth of its updates.
      checkpoint_every: updates between two checkpoints.
      explored: number of explored trials, where the data folder has none.
      ranking: how explored trials are ranked for each goal.
      tasks: number of tasks of each rollout.
      trials: number of trials in a row in each task.
      measured: number of trials after a stored context.
      cues: numbers of cues of the tasks.
      online_controls: conditions of n = 128 beside those behind stored contexts, each as many trials again.
      ring: number of devices that each chain is sharded over.
      decisions: decisions in a trial.
    """

    name: str
    arms: tuple[Arm, ...]
    seeds: int
    tokens: int
    tokens_per_update: int
    transformer: TransformerConfig
    optimizer: OptimizerConfig
    checkpoint_every: int
    explored: int = 200_000
    ranking: RankingConfig = field(default_factory=RankingConfig)
    tasks: int = 32
    trials: int = 128
    measured: int = 16
    cues: tuple[int, ...] = (1, 4, CUES)
    online_controls: tuple[Condition, ...] = ("no_context", "no_rewards", "window_32", "likeliest")
    ring: int = 1
    decisions: int = TRIAL_DECISIONS

    def arm(self, name: str) -> Arm:
        """The arm with this name.

        Raises:
          UnknownNameError: there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise UnknownNameError("arm", name, tuple(arm.name for arm in self.arms))

    def model(self, family: Family) -> AgenticTransformerConfig:
        """The configuration of the model, the same for all arms."""
        return AgenticTransformerConfig(
            self.transformer,
            family.observation_dim,
            family.action_dim,
            max_timestep=family.decisions,
            paired_tokens=True,
            action_modes=6,
        )

    def training(self, stage: Stage, family: Family, mesh: Mesh, seed: int) -> TrainConfig:
        """How to train in a stage."""
        shards = batch_shards(mesh)
        steps_per_trial = family.decisions // stage.action_repeat
        chain_tokens = stage.trials * steps_per_trial * self.model(family).tokens_per_step
        batch_size = shards * max(1, round(self.tokens_per_update / chain_tokens / shards))
        steps = max(1, round(stage.share * self.tokens / (batch_size * chain_tokens)))
        parts = 1
        if mesh.devices.flat[0].platform == "cpu":
            rows = rows_per_shard(batch_size, mesh)
            parts = gcd(rows, max(1, rows * chain_tokens // (PART_TOKENS * mesh.shape["ring"])))
        optimizer = self.optimizer.scaled(stage.rate)
        optimizer = replace(optimizer, warmup_steps=optimizer.warmup_of(steps), accumulation=parts)
        return TrainConfig(steps, batch_size, optimizer, self.checkpoint_every, log_every=10, seed=seed)


N4, N32, N128 = Arm("n4", 4), Arm("n32", 32), Arm("n128", 128, earlier=(Stage(32, FIRST_SHARE),))
ORACLE = Arm("oracle", 1, told=True)
_DEMO = CuePreset(
    name="demo",
    arms=(N128, N32, N4, ORACLE),
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
CUE_PRESETS = {
    # 2 cores, 16 minutes.
    "demo": _DEMO,
    # 2 cores, about 3 hours; one process a core.
    "full": replace(
        _DEMO,
        name="full",
        arms=(N128, N32, Arm("n16", 16), N4, Arm("n4_one_cue", 4, cues=(1,)), Arm("n1", 1), ORACLE),
        seeds=5,
        tokens=14_000_000,
        checkpoint_every=250,
    ),
    # What a body other than point_mass must show; 2 cores, about 4 hours. On reacher a model that is never
    # misled believes wrong pay too readily, and one that begins with few cues earns more with right pay over
    # what it earns with spoiled pay. 32 tasks are too few to measure the little that spoiled pay changes.
    "body": replace(
        _DEMO,
        name="body",
        arms=(
            *(
                replace(arm, earlier=(Stage(32, FIRST_SHARE, cues=(1, 2, 4)),), misleading=0.125)
                for arm in (N128, N32)
            ),
            ORACLE,
        ),
        seeds=3,
        tokens=28_000_000,
        checkpoint_every=250,
        tasks=128,
    ),
    # 2 cores, about an hour.
    "ablations": replace(
        _DEMO,
        name="ablations",
        arms=(
            N128,
            replace(N128, name="n128_without_graded", graded=0.0),
            replace(N128, name="n128_unweighted", first_leader_weight=1.0),
            replace(N128, name="n128_without_decoys", decoys=0.0),
            replace(N128, name="n128_all_trials", loss="all"),
            ORACLE,
        ),
    ),
    # 128 trials are 65,536 tokens. With steps of 32 decisions the same tokens hold 32 times as many trials,
    # in which the models learn what tells the goals; then the steps get shorter. 2 cores, about 2 hours.
    "long": replace(
        _DEMO,
        name="long",
        arms=(
            *(
                replace(
                    arm,
                    earlier=(
                        Stage(32, 0.24, action_repeat=32),
                        Stage(arm.trials, 0.56, action_repeat=32),
                        Stage(arm.trials, 0.13, action_repeat=8, rate=0.3),
                    ),
                    last_rate=0.2,
                )
                for arm in (N128, N32)
            ),
            ORACLE,
        ),
        tokens=15_000_000,
        optimizer=replace(_DEMO.optimizer, warmup_steps=7),
        explored=100_000,
        tasks=8,
        cues=(4, CUES),
        online_controls=(),
        ring=8,
        decisions=256,
    ),
}
