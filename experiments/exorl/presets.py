"""Sizes of the ExoRL runs: demo, small and paper."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jax.sharding import Mesh

from agentic_ring.data.domains import Domain
from agentic_ring.errors import ConfigError, check_at_least_one
from agentic_ring.mesh import batch_shards, rows_per_shard
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.models.pipeline import accumulation_parts
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from data_prep.collect import PLANS


def check_action_repeats(by_domain: Mapping[str, int]) -> None:
    """Raises a ``ConfigError`` if decisions last no step in some domain."""
    if min(by_domain.values(), default=1) < 1:
        raise ConfigError(f"action_repeat is {by_domain}; a decision lasts at least 1 step")


def spread_chains(wanted: float, mesh: Mesh) -> int:
    """The batch size nearest to ``wanted`` chains that the mesh can share out."""
    shards = batch_shards(mesh)
    return shards * max(1, round(wanted / shards))


def parts_of(batch_size: int, mesh: Mesh) -> int:
    """Parts of a batch that is computed one chain per device at a time; see ``Preset.accumulate``."""
    return accumulation_parts(rows_per_shard(batch_size, mesh), mesh.shape["stage"])


@dataclass(frozen=True)
class Preset:
    """A size of the main job."""

    name: str
    transformer: TransformerConfig
    trajectories: int
    """Number of trajectories of a chain."""
    updates: int
    """Number of optimiser updates."""
    tokens_per_update: int
    """Tokens of a batch, rounded to whole chains."""
    optimizer: OptimizerConfig
    checkpoint_every: int
    """Updates between two checkpoints."""
    trials: int
    """Rollouts after the prompt."""
    prompt_trajectories: int = 0
    """Stored trajectories in context before the first trial."""
    accumulate: bool = True
    """Whether a batch is computed one chain per device at a time (with stages: one microbatch per stage), and
    the gradients added up: long chains need the memory."""
    action_repeat: dict[str, int] = field(default_factory=dict)
    """Control steps per decision, by domain; 1 where it is not named."""
    lengthening: dict[str, int] = field(default_factory=dict)
    """Factor on the updates, by domain whose tasks take longer to learn; 1 where it is not named."""
    dropout: float = 0.0
    """See ``AgenticTransformerConfig``."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "trajectories", "updates")
        check_action_repeats(self.action_repeat)

    def for_domain(self, domain: Domain) -> "Preset":
        """The preset with as many updates as the domain's tasks take to learn."""
        factor = self.lengthening.get(domain.name, 1)
        every = self.checkpoint_every * factor
        return replace(self, updates=self.updates * factor, checkpoint_every=every, lengthening={})

    def with_trajectories(self, count: int) -> "Preset":
        """The preset with chains of ``count`` trajectories, and as many in context in the last trial.

        The number of trials stays, so that models of all lengths are rolled out alike; prompts fill the rest.
        """
        trials = min(self.trials, count)
        return replace(self, trajectories=count, trials=trials, prompt_trajectories=count - trials)

    def training(
        self, decisions: int, mesh: Mesh, seed: int = 0, batch_size: int | None = None
    ) -> TrainConfig:
        """How to train on chains of trajectories of ``decisions`` each, with batches spread over the mesh.

        ``batch_size``, of a run that is continued, must divide over the mesh; None takes
        ``tokens_per_update``.
        """
        if batch_size is None:
            chains = self.tokens_per_update / (self.trajectories * decisions * TOKENS_PER_STEP)
            batch_size = spread_chains(chains, mesh)
        parts = parts_of(batch_size, mesh)
        optimizer = replace(self.optimizer, accumulation=parts if self.accumulate else 1)
        return TrainConfig(self.updates, batch_size, optimizer, self.checkpoint_every, seed=seed)

    def model(self, domain: Domain, max_timestep: int) -> AgenticTransformerConfig:
        """The configuration of the Agentic Transformer for a domain."""
        return AgenticTransformerConfig(
            self.transformer, domain.observation_dim, domain.action_dim, max_timestep, dropout=self.dropout
        )


# A laptop: 2 cores, 8 GiB, minutes. Decisions last several steps, so that chains of 4 whole
# episodes are 2K (cartpole, maze, jaco) or 4K tokens (walker, cheetah, quadruped).
_DEMO = Preset(
    name="demo",
    transformer=TransformerConfig(width=128, layers=3, heads=2, ffn_width=256, remat="attention"),
    trajectories=4,
    updates=120,
    tokens_per_update=8_000,
    optimizer=OptimizerConfig(
        learning_rate=1e-3, warmup_steps=15, clip_norm=1.0, beta2=0.95, muon_learning_rate=0.02
    ),
    checkpoint_every=50,
    trials=4,
    accumulate=False,
    action_repeat={domain: plan.action_repeat for domain, plan in PLANS.items()},
    lengthening={"jaco": 3},
)
# One accelerator: chains of 16 x 1000 steps, 64K tokens.
_SMALL = Preset(
    name="small",
    transformer=TransformerConfig(
        width=512, layers=8, heads=8, ffn_width=1536, dtype="bfloat16", ffn_chunk=4096, rope_theta=500_000.0
    ),
    trajectories=16,
    updates=20_000,
    tokens_per_update=512_000,
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=1000),
    checkpoint_every=500,
    trials=4,
    prompt_trajectories=12,
)
# The paper's: 350M parameters, 128 trajectories x 1000 steps x 4 tokens = 512K tokens
# (arXiv 2310.01889, section 5.3); width, depth and optimiser are not given there and are ours.
_PAPER = replace(
    _SMALL,
    name="paper",
    transformer=replace(
        _SMALL.transformer, width=1024, layers=24, heads=16, ffn_width=3328, rope_theta=10_000_000.0
    ),
    trajectories=128,
    updates=100_000,
    tokens_per_update=4_096_000,
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000),
    checkpoint_every=1000,
    prompt_trajectories=124,
)
PRESETS = {preset.name: preset for preset in (_DEMO, _SMALL, _PAPER)}
