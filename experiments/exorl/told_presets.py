"""Sizes of the runs in which relabelled trajectories tell the task: demo, small and paper."""

from dataclasses import dataclass, field, replace

from jax.sharding import Mesh

from agentic_ring.attention import padded_length
from agentic_ring.data.domains import Domain
from agentic_ring.data.rewards.tasks import POSITIONS
from agentic_ring.data.told_chains import ToldChainConfig
from agentic_ring.errors import check_at_least_one
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.run import ToldEvaluation
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from data_prep.collect import PLANS
from experiments.exorl.presets import PRESETS, check_action_repeats, parts_of, spread_chains

ACTION_MODES = 4
_FEW = 432
"""Trajectories of the demo."""


@dataclass(frozen=True)
class ToldPreset:
    """A size of the main job."""

    name: str
    transformer: TransformerConfig
    chains: ToldChainConfig
    """Its action repeat and seed are those of the run."""
    batch_size: int
    """Chains per update, rounded to what the mesh can share out."""
    updates: int
    cloning_updates: int
    """Updates of the model of a single task that is compared with."""
    optimizer: OptimizerConfig
    checkpoint_every: int
    """Updates between two checkpoints."""
    rewards: int = 1500
    """Number of reward functions to draw."""
    accumulate: bool = True
    """Whether a batch is computed one chain per device at a time, as in ``Preset``."""
    action_repeat: dict[str, int] = field(default_factory=dict)
    """Control steps per decision, by domain; 1 where it is not named."""
    dropout: float = 0.0
    held_back: int = 0
    """Trajectories for evaluation only, see ``ToldRunConfig``."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "updates", "cloning_updates", "batch_size", "rewards")
        check_at_least_one(self.chains, "trajectories")
        check_action_repeats(self.action_repeat)

    def with_trajectories(self, count: int) -> "ToldPreset":
        """The preset with chains of ``count`` trajectories."""
        return replace(self, chains=replace(self.chains, trajectories=count))

    def for_domain(self, domain: Domain) -> "ToldPreset":
        """The preset with at most as many known steps as the domain has decisions."""
        decisions = domain.decisions(self.action_repeat.get(domain.name, 1))
        return replace(self, chains=replace(self.chains, spans=min(self.chains.spans, decisions)))

    @property
    def cloning(self) -> ToldChainConfig:
        """Chains of the model of a single task: decisions alone, as many as there are steps otherwise."""
        return replace(self.chains, trajectories=0, decisions=self.chains.steps, groups=1, task_share=0.0)

    def noise_for(self, trajectories: int) -> float:
        """The noise of learned observations for a store of so many trajectories.

        It is that of the chains for 432, and falls with the root of their number (measured: 0.15 for 432; at
        most 0.05 for 8,000). Where rewards are goals it is a length in the world, whatever the data.
        """
        fewer = 1.0 if self.chains.goals else min(1.0, (_FEW / trajectories) ** 0.5)
        return self.chains.noise * fewer

    def length(self, mesh: Mesh) -> int:
        """Number of steps of a chain, padding included."""
        return padded_length(self.chains.steps, mesh.shape["ring"], "zigzag")

    def training(
        self, mesh: Mesh, seed: int = 0, batch_size: int | None = None, updates: int | None = None
    ) -> TrainConfig:
        """How to train, for ``updates`` if they are given; ``batch_size`` is that of a run to continue."""
        size = batch_size or spread_chains(self.batch_size, mesh)
        optimizer = replace(self.optimizer, accumulation=parts_of(size, mesh) if self.accumulate else 1)
        return TrainConfig(updates or self.updates, size, optimizer, self.checkpoint_every, seed=seed)

    def model(self, domain: Domain) -> AgenticTransformerConfig:
        """The configuration of the Agentic Transformer for a domain."""
        return AgenticTransformerConfig(
            self.transformer,
            domain.observation_dim,
            domain.action_dim,
            max_timestep=self.chains.spans,
            single_tokens=True,
            action_modes=ACTION_MODES,
            dropout=self.dropout,
        )

    def evaluation(self) -> ToldEvaluation:
        """The contexts to evaluate: those of ``ToldEvaluation`` below the chain's, and the chain's."""
        most = self.chains.trajectories
        shorter = (count for count in ToldEvaluation().contexts if count < most)
        return ToldEvaluation(contexts=(*shorter, most))


# A laptop: 2 cores, minutes. A trajectory is 5 steps, so that 128 are 640 tokens.
_DEMO = ToldPreset(
    name="demo",
    transformer=replace(PRESETS["demo"].transformer, remat="none"),
    chains=ToldChainConfig(),
    batch_size=4,
    updates=700,
    cloning_updates=100,
    optimizer=OptimizerConfig(
        learning_rate=2e-3, warmup_steps=20, clip_norm=1.0, beta2=0.95, muon_learning_rate=0.02
    ),
    checkpoint_every=250,
    accumulate=False,
    action_repeat={domain: plan.action_repeat for domain, plan in PLANS.items()},
)
# One accelerator: a trajectory is 50 steps, a chain 7K tokens.
_SMALL = replace(
    _DEMO,
    name="small",
    transformer=PRESETS["small"].transformer,
    chains=ToldChainConfig(spans=50, decisions=1024, groups=16),
    batch_size=64,
    updates=20_000,
    cloning_updates=2_000,
    optimizer=PRESETS["small"].optimizer,
    checkpoint_every=500,
    rewards=10_000,
    accumulate=True,
    action_repeat={},
)
# Every step of 128 trajectories: 128K known steps, in one token each, and 4K decisions.
_PAPER = replace(
    _SMALL,
    name="paper",
    transformer=PRESETS["paper"].transformer,
    chains=ToldChainConfig(spans=1000, decisions=4096, groups=64),
    batch_size=32,
    updates=100_000,
    cloning_updates=5_000,
    optimizer=PRESETS["paper"].optimizer,
    checkpoint_every=1000,
)
TOLD_PRESETS = {preset.name: preset for preset in (_DEMO, _SMALL, _PAPER)}


def _for_goals(preset: ToldPreset, **chains: int) -> ToldPreset:
    """Noise of 2 mm in the maze, where a goal is 40 wide; contexts that cannot have been learned by heart."""
    return replace(preset, chains=replace(preset.chains, goals=True, noise=0.012, **chains), held_back=200)


# A chain has one goal, and it takes many to learn where to look: many short chains. A known step shows where
# its span met the goal, so that one tells whether its trajectory did, and where.
_DEMO_GOALS = replace(_for_goals(_DEMO, spans=1, decisions=96, guided=9000), batch_size=12, updates=1500)
GOAL_PRESETS = {preset.name: preset for preset in (_DEMO_GOALS, _for_goals(_SMALL), _for_goals(_PAPER))}
"""The same where rewards are goals."""


def told_preset(name: str, domain: Domain) -> ToldPreset:
    """The preset with this name for the rewards of a domain."""
    return (GOAL_PRESETS if domain.name in POSITIONS else TOLD_PRESETS)[name]
