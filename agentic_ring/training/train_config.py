"""Settings of a training run."""

from dataclasses import dataclass, field

from agentic_ring.errors import ConfigError, check_at_least_one
from agentic_ring.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class TrainConfig:
    """Length and settings of a training run."""

    steps: int
    batch_size: int
    """Rows (chains or rows of text) per update, summed over all devices."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint_every: int = 100
    """Updates between two checkpoints, the best of which is kept."""
    checkpoint_minutes: float = 5.0
    """Maximum time between two checkpoints; those that only the time asks for are kept until the next one."""
    log_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(self, "steps", "batch_size", "checkpoint_every", "log_every")
        if not self.checkpoint_minutes > 0:
            raise ConfigError(f"checkpoint_minutes is {self.checkpoint_minutes}; it must be positive")
        if self.batch_size % self.optimizer.accumulation:
            raise ConfigError(
                f"batch_size {self.batch_size} is not divisible by accumulation {self.optimizer.accumulation}"
            )
