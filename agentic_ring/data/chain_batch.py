"""A batch of chains, as models are trained on it."""

from dataclasses import dataclass
from functools import partial

import jax

from agentic_ring.attention.ring.layout import Layout
from agentic_ring.models.agentic_transformer import ChainSteps


@partial(jax.tree_util.register_dataclass, data_fields=["steps", "weight", "seed"], meta_fields=["layout"])
@dataclass(frozen=True)
class ChainBatch:
    """Steps of several chains, and the loss weight of each step's action.

    Attributes:
      steps: see ``ChainSteps``, [B, S].
      weight: float32 [B, S], 0 for steps without loss.
      seed: uint32 [B, S], the seed of each step's chain, for dropout.
      layout: order of the steps over the ring.
    """

    steps: ChainSteps
    weight: jax.Array
    seed: jax.Array
    layout: Layout
