"""The optimiser: gradient clipping, AdamW and the learning-rate schedule."""

from dataclasses import dataclass
from functools import partial

import jax
import optax

from agentic_ring.errors import ConfigError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and gradient clipping."""

    learning_rate: float = 1e-4
    warmup_steps: int = 100
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of its peak."""
    weight_decay: float = 1e-4
    clip_norm: float = 0.25
    """Global norm to which gradients are clipped, as in Decision and Agentic Transformer."""
    beta2: float = 0.999
    accumulation: int = 1
    """Parts into which a batch is split; their gradients are summed before the update."""

    def __post_init__(self) -> None:
        if self.accumulation < 1 or self.learning_rate <= 0 or self.clip_norm <= 0:
            raise ConfigError(
                f"accumulation {self.accumulation}, learning_rate {self.learning_rate} and clip_norm "
                f"{self.clip_norm} must all be positive"
            )


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then a cosine to ``final_fraction`` of the peak at the last step."""
    warmup = min(config.warmup_steps, max(steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(steps, 1), config.learning_rate * config.final_fraction
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; weight decay applies to matrices, not to biases and norm scales."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=partial(jax.tree_util.tree_map_with_path, _decays),
        ),
    )


def _decays(path: tuple, _: jax.Array) -> bool:
    return path[-1].key not in ("bias", "scale")
