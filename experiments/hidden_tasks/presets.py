"""Variants of the model, and sizes of the experiment on trained context length: demo, full and body."""

from dataclasses import dataclass, field, replace
from math import gcd

import jax

from agentic_ring.data.families.cue_chains import CueChainConfig
from agentic_ring.data.families.family import Family
from agentic_ring.data.families.ranked_trials import RankingConfig
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig

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
      name: as in ``verdict``; one that differs from such a variant in a setting is named after both, such as
        n4_one_cue, and compared with it.
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
    """A size of the experiment.

    Attributes:
      name: as on the command line.
      variants: the models; the longest to train come first.
      seeds: number of training seeds.
      tokens: number of tokens that each variant is trained on.
      tokens_per_update: tokens of a batch, rounded to whole chains.
      transformer: the stack.
      optimizer: settings of each stage; a short stage warms up in an eighth of its updates.
      checkpoint_every: updates between two checkpoints.
      explored: number of explored trials, where the data folder has none.
      ranking: how explored trials are ranked for each goal.
      tasks: number of tasks of each rollout.
      trials: number of trials in a row in each task.
      measured: number of trials after a stored context.
    """

    name: str
    variants: tuple[Variant, ...]
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
        tasks=128,
    ),
}
