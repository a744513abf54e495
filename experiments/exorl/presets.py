"""Named runs: the same program at three sizes."""

from dataclasses import dataclass, field, replace

from agentic_ring.data.tasks import Domain
from agentic_ring.errors import ConfigError
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.models.transformer import TransformerConfig
from agentic_ring.training.loop import TrainConfig
from agentic_ring.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Preset:
    """A size of the main job.

    Attributes:
      transformer: the stack.
      trajectories: members of a chain.
      action_repeat: environment steps that one decision lasts, by domain; 1 where it is not named.
      updates: of the optimiser.
      tokens_per_update: about as many, in whole chains.
      accumulate: work through a batch one chain a device at a time, adding up gradients: long chains
        need the memory.
      optimizer: AdamW's settings.
      checkpoint_every: updates between two checkpoints.
      trials: rollouts after the prompt.
      prompt_trajectories: stored trajectories in context before the first trial.
    """

    transformer: TransformerConfig
    trajectories: int
    updates: int
    tokens_per_update: int
    optimizer: OptimizerConfig
    checkpoint_every: int
    trials: int
    prompt_trajectories: int = 0
    accumulate: bool = True
    action_repeat: dict[str, int] = field(default_factory=dict)

    def with_trajectories(self, count: int) -> "Preset":
        """The same with chains of ``count`` trajectories; a shorter chain has fewer prompts, then trials."""
        if count < 1:
            raise ConfigError(f"{count} trajectories were asked for; a chain needs at least 1")
        trials = min(self.trials, count) if self.prompt_trajectories else count
        return replace(self, trajectories=count, trials=trials, prompt_trajectories=count - trials)

    def with_action_repeat(self, domain: Domain, steps: int) -> "Preset":
        """The same with decisions of so many control steps in this domain."""
        if steps < 1:
            raise ConfigError(f"an action repeat of {steps} was asked for; a decision lasts at least 1 step")
        return replace(self, action_repeat={**self.action_repeat, domain.name: steps})

    def with_updates(self, count: int) -> "Preset":
        """The same with so many updates; the learning rate falls over all of them."""
        if count < 1:
            raise ConfigError(f"{count} updates were asked for; give at least 1")
        return replace(self, updates=count)

    def training(self, chain_steps: int, batch_shards: int, seed: int = 0) -> TrainConfig:
        """How long and how to train on chains of ``chain_steps``, batches spread over ``batch_shards``."""
        chains = self.tokens_per_update / (chain_steps * TOKENS_PER_STEP)
        chains_a_shard = max(1, round(chains / batch_shards))
        optimizer = replace(self.optimizer, accumulation=chains_a_shard if self.accumulate else 1)
        batch_size = chains_a_shard * batch_shards
        return TrainConfig(self.updates, batch_size, optimizer, self.checkpoint_every, seed=seed)

    def model(self, domain: Domain, max_timestep: int) -> AgenticTransformerConfig:
        """The Agentic Transformer of this size for a domain."""
        return AgenticTransformerConfig(
            self.transformer, domain.observation_dim, domain.action_dim, max_timestep
        )


PRESETS = {
    # A laptop: 2 cores, 8 GiB, minutes. Decisions last several steps, so that chains of 4 whole
    # episodes are 2K (cartpole, maze, jaco) or 4K tokens (walker, cheetah, quadruped).
    "demo": Preset(
        transformer=TransformerConfig(width=128, layers=3, heads=4, ffn_width=256, remat="none"),
        trajectories=4,
        updates=250,
        tokens_per_update=8_000,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=30, clip_norm=1.0, beta2=0.95),
        checkpoint_every=50,
        trials=4,
        accumulate=False,
        action_repeat={
            "cartpole": 8,
            "walker": 4,
            "cheetah": 4,
            "quadruped": 4,
            "point_mass_maze": 8,
            "jaco": 2,
        },
    ),
    # One accelerator: chains of 16 x 1000 steps, 64K tokens.
    "small": Preset(
        transformer=TransformerConfig(
            width=512,
            layers=8,
            heads=8,
            ffn_width=1536,
            dtype="bfloat16",
            ffn_chunk=4096,
            rope_theta=500_000.0,
        ),
        trajectories=16,
        updates=20_000,
        tokens_per_update=512_000,
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=1000),
        checkpoint_every=500,
        trials=4,
        prompt_trajectories=12,
    ),
    # The paper's: 350M parameters, 128 trajectories x 1000 steps x 4 tokens = 512K tokens
    # (arXiv 2310.01889, section 5.3); width, depth and optimiser are not given there and are ours.
    "paper": Preset(
        transformer=TransformerConfig(
            width=1024,
            layers=24,
            heads=16,
            ffn_width=3328,
            dtype="bfloat16",
            ffn_chunk=4096,
            rope_theta=10_000_000.0,
        ),
        trajectories=128,
        updates=100_000,
        tokens_per_update=4_096_000,
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000),
        checkpoint_every=1000,
        trials=4,
        prompt_trajectories=124,
    ),
}
