"""Trajectories in two forms: the rows of an ExoRL file, and transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agentic_ring.data.domains import Domain
from agentic_ring.errors import DataError

# ExoRL's arrays and their dtypes (denisyarats/exorl: replay_buffer.py, dmc.py).
EPISODE_DTYPES = {
    "observation": np.dtype(np.float32),
    "action": np.dtype(np.float32),
    "reward": np.dtype(np.float32),
    "discount": np.dtype(np.float32),
    "physics": np.dtype(np.float64),
}
# Actions are clipped to [-1, 1] before they are recorded; float32 rounding may leave them just outside.
ACTION_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Trajectory:
    """T consecutive transitions, of a whole episode or a part of one.

    Attributes:
      observation: float32 [T, O], before each action.
      action: float32 [T, A], in [-1, 1].
      reward: float32 [T], of each action.

    Raises:
      DataError: the shapes disagree, there is no transition, or a value is not finite.
    """

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray

    def __post_init__(self) -> None:
        shapes = (self.observation.shape, self.action.shape, self.reward.shape)
        lengths = {shape[0] for shape in shapes}
        if tuple(map(len, shapes)) != (2, 2, 1) or len(lengths) != 1 or 0 in lengths:
            raise DataError(
                "a trajectory is observation [T, O], action [T, A], reward [T] with at least one transition, "
                f"not {shapes}"
            )
        for name in ("observation", "action", "reward"):
            _require_finite(name, getattr(self, name))

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True)
class Episode:
    """A trajectory as ExoRL stores it: T + 1 rows; row 0 is the reset.

    Transition i >= 1 leads from ``observation[i - 1]`` by ``action[i]`` to ``observation[i]`` with
    ``reward[i]``; row 0 has action 0, reward 0 and discount 1.
    """

    observation: np.ndarray
    """float32 [T + 1, O]."""
    action: np.ndarray
    """float32 [T + 1, A]."""
    reward: np.ndarray
    """float32 [T + 1, 1], of the task (or intrinsic reward) at recording."""
    discount: np.ndarray
    """float32 [T + 1, 1]."""
    physics: np.ndarray
    """float64 [T + 1, P], MuJoCo's qpos, qvel and activations."""

    def __len__(self) -> int:
        """T, the number of transitions."""
        return len(self.observation) - 1


def episode_widths(domain: Domain) -> dict[str, int]:
    """Returns the number of columns of each array of an episode."""
    dims = domain.observation_dim, domain.action_dim, 1, 1, domain.physics_dim
    return dict(zip(EPISODE_DTYPES, dims, strict=True))


def make_episode(arrays: Mapping[str, np.ndarray], domain: Domain) -> Episode:
    """Checks external arrays and makes an episode of ``domain`` from them.

    Raises:
      DataError: an array is missing, of another dtype, shape or length, not finite or out of range; the
        error names the first one and what was expected. Others, such as URLB's ``skill``, are left out.
    """
    if not set(arrays) >= set(EPISODE_DTYPES):
        raise DataError(f"arrays are {sorted(arrays)}, expected {sorted(EPISODE_DTYPES)}")
    rows = arrays["observation"].shape[0] if arrays["observation"].ndim else 0
    for name, width in episode_widths(domain).items():
        found = f"{arrays[name].dtype} {arrays[name].shape}"
        expected = f"{EPISODE_DTYPES[name]} {(rows, width)}"
        if found != expected:
            raise DataError(f"{name} is {found}, expected {expected} in domain {domain.name}")
    if not 2 <= rows <= domain.episode_steps + 1:
        raise DataError(
            f"the episode has length {max(rows - 1, 0)}; {domain.name} has 1 to {domain.episode_steps} steps"
        )
    for name in EPISODE_DTYPES:
        _require_finite(name, arrays[name])
    largest = float(np.abs(arrays["action"]).max())
    if largest > 1 + ACTION_TOLERANCE:
        raise DataError(f"action reaches {largest:.6g}, expected values in [-1, 1]")
    return Episode(**{name: arrays[name] for name in EPISODE_DTYPES})


def detect_action_repeat(action: np.ndarray) -> int:
    """Returns how many steps actions [T, A] are held: the largest n >= 1 that divides all change points.

    It is 1 if the action never changes, since its repeat is then unknown.
    """
    return int(np.gcd.reduce(_changes(action))) or 1


def is_held(action: np.ndarray, repeat: int) -> bool:
    """Whether actions [T, A] change only at multiples of ``repeat`` steps."""
    return not (_changes(action) % repeat).any()


def _changes(action: np.ndarray) -> np.ndarray:
    return np.flatnonzero((action[1:] != action[:-1]).any(axis=1)) + 1


def _require_finite(name: str, array: np.ndarray) -> None:
    finite = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if not finite.all():
        raise DataError(f"{name} is not finite in row {int(np.flatnonzero(~finite)[0])} of {len(array)}")
