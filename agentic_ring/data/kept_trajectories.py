"""Stored trajectories in the form in which they tell a policy any reward, and the file that holds them.

A policy keeps them beside its weights as ``trajectories.npz``, in half precision and with one control step of
each decision, so that it needs no store.
"""

from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.spans import shown_decisions
from agentic_ring.data.told_chains import ToldDecisions, decision_rewards
from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz

FILE_NAME = "trajectories.npz"
_MOST_BYTES = 64 << 20


class KeptTrajectories(NamedTuple):
    """What known steps of n trajectories show, and what rewards are functions of."""

    observation: np.ndarray
    """float32 [n, spans, O], normalised, of the decisions that known steps show."""
    action: np.ndarray
    """float32 [n, spans, A] of the same."""
    features: Features
    """float32 [n, T] each, of the control steps."""
    action_repeat: int
    """Control steps of a decision."""

    @classmethod
    def of(cls, data: ToldDecisions, spans: int, action_repeat: int) -> Self:
        """All trajectories of ``data``, whose decisions have ``action_repeat`` control steps."""
        count, decisions = data.action.shape[:2]
        shown = shown_decisions(decisions, spans)
        features = data.features(np.arange(count)).items()
        rows = Features({name: values.reshape(count, -1) for name, values in features})
        return cls(data.observation[:, shown], data.action[:, shown], rows, action_repeat)

    def chosen(self, numbers: np.ndarray) -> Self:
        """The trajectories with these numbers."""
        features = Features({name: values[numbers] for name, values in self.features.items()})
        return type(self)(self.observation[numbers], self.action[numbers], features, self.action_repeat)

    def rewards(self, reward: RewardOfFeatures) -> np.ndarray:
        """Mean reward over the control steps of each decision, float32 [n, D]."""
        flat = Features({name: values.ravel() for name, values in self.features.items()})
        return decision_rewards(reward(flat).reshape(len(self.action), -1), self.action_repeat)

    def write(self, folder: Path) -> None:
        """Writes them to a folder; of each decision the control step in its middle is kept."""
        middle = np.s_[:, self.action_repeat // 2 :: self.action_repeat]
        features = {name: values[middle] for name, values in self.features.items()}
        arrays = {"observation": self.observation, "action": self.action, **features}
        with replacing(folder / FILE_NAME) as beside, beside.open("wb") as file:
            np.savez_compressed(file, **{name: values.astype(np.float16) for name, values in arrays.items()})

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
