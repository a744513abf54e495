"""Settings of a training run, and its optimiser: clipping, AdamW, Muon for matrices, the learning rate."""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import optax
import optax.contrib

from agentic_ring.errors import ConfigError, check_at_least_one, check_positive, set_fields


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and gradient clipping; on request Muon for matrices."""

    learning_rate: float = 1e-4
    warmup_steps: int = 100
    """Updates below the peak learning rate; in short runs fewer, at most an eighth of all updates."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of its peak."""
    weight_decay: float = 1e-4
    clip_norm: float = 0.25
    """Global norm to which gradients are clipped, as in Decision and Agentic Transformer."""
    beta2: float = 0.999
    accumulation: int = 1
    """Parts into which a batch is split; their gradients are summed before the update."""
    muon_learning_rate: float | None = None
    """Peak learning rate of the blocks' matrices under Muon, which orthogonalises their updates; None trains
    them with AdamW, too."""

    def __post_init__(self) -> None:
        check_positive(self, "learning_rate", "clip_norm", *set_fields(self, "muon_learning_rate"))
        check_at_least_one(self, "accumulation")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it must be at least 0")

    def warmup_of(self, steps: int) -> int:
        """Number of updates below the peak in a run of ``steps``; a short one peaks and decays, too."""
        return min(self.warmup_steps, steps // 8)

    def scaled(self, factor: float) -> "OptimizerConfig":
        """The same settings with all learning rates multiplied by ``factor``."""
        muon = None if self.muon_learning_rate is None else factor * self.muon_learning_rate
        return replace(self, learning_rate=factor * self.learning_rate, muon_learning_rate=muon)


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
        check_positive(self, "checkpoint_minutes")
        if self.batch_size % self.optimizer.accumulation:
            raise ConfigError(
                f"batch_size {self.batch_size} is not divisible by accumulation {self.optimizer.accumulation}"
            )


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate of each of ``steps`` updates, counted from 0.

    It rises linearly over the warm-up, from above 0 to the peak in the update after it, and falls with a
    cosine to ``final_fraction`` of the peak in the last update.
    """
    warmup, peak = config.warmup_of(steps), config.learning_rate
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, max(steps - 1, 1), peak * config.final_fraction
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; weight decay applies to matrices, not to biases and norm scales.

    With a learning rate for Muon (arXiv 2502.16982) the blocks' matrices are trained with it, and only they
    decay; AdamW then has Nesterov's momentum, too.
    """
    schedule = learning_rate_schedule(config, steps)
    if config.muon_learning_rate is None:
        mask = partial(jax.tree.map_with_path, _decays)
        update = optax.adamw(schedule, b2=config.beta2, weight_decay=config.weight_decay, mask=mask)
    else:
        update = optax.contrib.muon(
            learning_rate_schedule(replace(config, learning_rate=config.muon_learning_rate), steps),
            weight_decay=config.weight_decay,
            adam_b2=config.beta2,
            adam_learning_rate=schedule,
            muon_weight_dimension_numbers=partial(jax.tree.map_with_path, _matrix),
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def _decays(path: tuple, _: jax.Array) -> bool:
    return not path[-1].key.endswith(("bias", "scale"))


def _matrix(path: tuple, parameter: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """The axes of rows and columns of the matrices of layers, which axis 0 counts; None for no matrices."""
    inside = any(key.key == "blocks" for key in path[:-1])
    if not inside or parameter.ndim < 3 or not _decays(path, parameter):
        return None
    if parameter.ndim == 3:
        return optax.contrib.MuonDimensionNumbers(1, 2)
    # Projections to heads are [L, D, N, H], that of their outputs is [L, N, H, D].
    axes = ((1, 2), 3) if path[-1].key == "output" else (1, (2, 3))
    return optax.contrib.MuonDimensionNumbers(*axes)
