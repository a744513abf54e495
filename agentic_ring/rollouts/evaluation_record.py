"""``evaluation.npz``: data and first rollout of an evaluation, so that a report needs no new rollout.

    data_returns     float64 [N]            of the training trajectories
    data_algorithms  string [N]             algorithm that collected each of them
    observation      float32 [K, T, O]      of the first environment, in K trials of T decisions
    action           float32 [K, T, A]
    reward           float32 [K, T]         of each decision
    physics          float64 [K, T + 1, P]  MuJoCo's state before each decision and after the last

An action is repeated for ``action_repeat`` control steps: that is one decision.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from gymnasium.vector import SyncVectorEnv
from numpy.typing import ArrayLike

from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz
from agentic_ring.rollouts.trials import TrialPolicy

FILE_NAME = "evaluation.npz"
_MOST_BYTES = 1 << 30
"""Limit for all arrays; 128 trials of 1000 decisions of the largest domain take a tenth of it."""


@dataclass(frozen=True)
class Rollout:
    """The trials of one environment; the module's docstring has the shapes."""

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    physics: np.ndarray


@dataclass(frozen=True)
class EvaluationRecord:
    """The content of an ``evaluation.npz``."""

    data_returns: np.ndarray
    data_algorithms: np.ndarray
    rollout: Rollout


class RecordingPolicy:
    """Acts as ``policy`` does and records the first environment.

    Args:
      policy: the policy that acts.
      environments: the environments it acts in, from ``make_environments``.
    """

    def __init__(self, policy: TrialPolicy, environments: SyncVectorEnv):
        self._policy = policy
        self._environments = environments
        self._trials: list[dict[str, list[np.ndarray]]] = []
        self._action: ArrayLike

    def begin_trial(self) -> None:
        """Starts the record of a trial."""
        self._trials.append({field.name: [] for field in fields(Rollout)})
        self._policy.begin_trial()

    def act(self, observation: np.ndarray) -> ArrayLike:
        """The policy's actions float32 [E, A]."""
        trial = self._trials[-1]
        trial["observation"].append(observation[0].copy())
        trial["physics"].append(self._physics())
        self._action = self._policy.act(observation)
        return self._action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Records the reward of the first environment and passes all rewards on; ``last`` ends the trial."""
        trial = self._trials[-1]
        trial["action"].append(np.asarray(self._action)[0].copy())
        trial["reward"].append(reward[0])
        if last:
            trial["physics"].append(self._physics())
        self._policy.receive(reward, last)

    def rollout(self) -> Rollout:
        """All trials so far; each must have ended."""
        return Rollout(
            **{
                field.name: np.array([trial[field.name] for trial in self._trials])
                for field in fields(Rollout)
            }
        )

    def _physics(self) -> np.ndarray:
        return self._environments.call("physics_state")[0]


def write_record(directory: Path, record: EvaluationRecord) -> None:
    """Writes the run's ``evaluation.npz`` atomically."""
    rollout = {field.name: getattr(record.rollout, field.name) for field in fields(Rollout)}
    with replacing(directory / FILE_NAME) as beside, beside.open("wb") as file:
        np.savez_compressed(
            file, data_returns=record.data_returns, data_algorithms=record.data_algorithms, **rollout
        )


def read_record(directory: Path) -> EvaluationRecord | None:
    """Reads the run's ``evaluation.npz``; None if the run has none.

    Raises:
      DataError: it is damaged, or the shapes of its arrays do not match.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    try:
        arrays = read_npz(path, _MOST_BYTES)
    except DataError as error:
        raise DataError(
            f"{path} cannot be read: {error}; run the experiment again, which repeats the evaluation"
        ) from error
    _check(path, arrays)
    rollout = Rollout(**{field.name: arrays[field.name] for field in fields(Rollout)})
    return EvaluationRecord(arrays["data_returns"], arrays["data_algorithms"], rollout)


# Kind of dtype and shape of each array; a letter stands for a free size.
_FORMAT = {
    "data_returns": ("f", "N"),
    "data_algorithms": ("U", "N"),
    "observation": ("f", "KTO"),
    "action": ("f", "KTA"),
    "reward": ("f", "KT"),
    "physics": ("f", "KSP"),
}


def _check(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Checks names, dtypes and shapes, and that all values are finite.

    Raises:
      DataError: a check fails.
    """
    if set(arrays) != set(_FORMAT):
        raise DataError(
            f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; expected {', '.join(_FORMAT)}"
        )
    sizes: dict[str, int] = {}
    for name, (kind, shape) in _FORMAT.items():
        array = arrays[name]
        fits = array.dtype.kind == kind and array.ndim == len(shape) and array.size > 0
        if not fits or any(
            sizes.setdefault(letter, n) != n for letter, n in zip(shape, array.shape, strict=True)
        ):
            raise DataError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}; expected kind {kind!r} and shape "
                f"[{', '.join(shape)}], where {sizes}"
            )
        if kind == "f" and not np.isfinite(array).all():
            raise DataError(f"{path}: {name} holds values that are not finite")
    if sizes["S"] != sizes["T"] + 1:
        raise DataError(f"{path}: physics has {sizes['S']} rows per trial; expected {sizes['T'] + 1}")
