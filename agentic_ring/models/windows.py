"""Windows: the last few decisions of a trajectory, which are the input of the baselines."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """K consecutive decisions of one trajectory per row, the current one last; padding is 0.

    Attributes:
      return_to_go: float32 [B, K], scaled.
      observation: float32 [B, K, O], normalised.
      action: float32 [B, K, A] in [-1, 1]; the last one is the target of the prediction, not an input.
      timestep: int32 [B, K] within the trajectory.
      present: bool [B, K]; False for padding before the first decision of the trajectory.
    """

    return_to_go: Any
    observation: Any
    action: Any
    timestep: Any
    present: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowBatch:
    """Windows, and the loss weight of each decision's action: float32 [B, K], 1 or 0."""

    windows: Windows
    weight: Any
