"""Windows: the last few decisions before an action, which is all that the baselines see."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["return_to_go", "observation", "action", "timestep", "present"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Windows:
    """K consecutive decisions of one trajectory each, the present one last; what is absent is 0.

    Attributes:
      return_to_go: float32 [B, K], scaled.
      observation: float32 [B, K, O], normalised.
      action: float32 [B, K, A] in [-1, 1]; the last is what a model is asked for and does not see.
      timestep: int32 [B, K] within the trajectory.
      present: bool [B, K]; False before the trajectory's first decision.
    """

    return_to_go: Any
    observation: Any
    action: Any
    timestep: Any
    present: Any


@partial(jax.tree_util.register_dataclass, data_fields=["windows", "weight"], meta_fields=[])
@dataclass(frozen=True)
class WindowBatch:
    """Windows, and how much each decision's action counts in the loss: float32 [B, K], 1 or 0."""

    windows: Windows
    weight: Any
