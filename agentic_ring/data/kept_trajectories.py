"""Stored trajectories in the form in which they tell a policy any reward, and the file that holds them.

A policy keeps them beside its weights as ``trajectories.npz``, in half precision and with one control step of
each decision, so that it needs no store.
"""

from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.told_chains import ToldDecisions, decision_rewards
from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz

FILE_NAME = "trajectories.npz"
_MOST_BYTES = 64 << 20


class KeptTrajectories(NamedTuple):
    """What n trajectories of D decisions show, and what rewards are functions of."""

    observation: np.ndarray
    """float32 [n, D, O], normalised."""
    action: np.ndarray
    """float32 [n, D, A]."""
    features: Features
    """float32 [n, T] each, of the control steps."""
    action_repeat: int
    """Control steps of a decision."""

    @classmethod
    def of(cls, data: ToldDecisions, action_repeat: int) -> Self:
        """All trajectories of ``data``, whose decisions have ``action_repeat`` control steps."""
        count = len(data.action)
        features = data.features(np.arange(count)).items()
        rows = Features({name: values.reshape(count, -1) for name, values in features})
        return cls(data.observation, data.action, rows, action_repeat)

    def chosen(self, numbers: np.ndarray) -> Self:
        """The trajectories with these numbers."""
        features = Features({name: values[numbers] for name, values in self.features.items()})
        return type(self)(self.observation[numbers], self.action[numbers], features, self.action_repeat)

    def rewards(self, reward: RewardOfFeatures) -> np.ndarray:
        """Mean reward over the control steps of each decision, float32 [n, D]."""
        flat = Features({name: values.ravel() for name, values in self.features.items()})
        return decision_rewards(reward(flat).reshape(len(self.action), -1), self.action_repeat)

    def write(self, folder: Path, shown: np.ndarray) -> None:
        """Writes them to a folder; of each decision the control step in its middle is kept.

        Args:
          shown: numbers of the decisions that known steps may show; the others' observations and actions
            are written as 0, which takes no space.
        """
        middle = np.s_[:, self.action_repeat // 2 :: self.action_repeat]
        arrays = {name: values[middle] for name, values in self.features.items()}
        for name, values in (("observation", self.observation), ("action", self.action)):
            arrays[name] = np.zeros_like(values)
            arrays[name][:, shown] = values[:, shown]
        halved: dict[str, Any] = {name: values.astype(np.float16) for name, values in arrays.items()}
        with replacing(folder / FILE_NAME) as beside, beside.open("wb") as file:
            np.savez_compressed(file, **halved)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads those in a folder; None if it has none, a ``DataError`` if they are damaged."""
        path = folder / FILE_NAME
        if not path.exists():
            return None
        try:
            arrays = {name: values.astype(np.float32) for name, values in read_npz(path, _MOST_BYTES).items()}
            return cls(arrays.pop("observation"), arrays.pop("action"), Features(arrays), 1)
        except (DataError, KeyError) as error:
            raise DataError(f"{path} is damaged: {error}; export the policy again") from error
