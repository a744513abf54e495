"""Stored trajectories as decisions, in the form in which they can be relabelled with any reward.

A policy keeps some beside its weights as ``trajectories.npz``, in half precision and with one control step of
each decision, so that it needs no store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from agentic_ring.data.rewards.features import Features, compute_features
from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.store import Scaling, TrajectoryStore
from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz

KEPT_FILE = "trajectories.npz"
_MOST_BYTES = 64 << 20
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class ToldDecisions:
    """What E trajectories of D decisions show, and what rewards are functions of."""

    observation: np.ndarray
    """float32 [E, D, O], normalised."""
    action: np.ndarray
    """float32 [E, D, A]."""
    features: Features
    """float32 [E, T] each, of control steps."""
    action_repeat: int
    """Number of these steps in a decision."""

    @classmethod
    def of_store(
        cls,
        store: TrajectoryStore,
        scaling: Scaling,
        action_repeat: int,
        episodes: Sequence[int] | np.ndarray | None = None,
    ) -> Self:
        """Reads episodes, all of the domain's length.

        Args:
          episodes: int [E], their numbers in the store; None takes all.

        Raises:
          DataError: an episode has another length, or actions are not held for ``action_repeat`` steps.
        """
        store.require_held(action_repeat)
        domain = store.domain
        if wrong := sorted({*store.lengths.tolist()} - {domain.episode_steps}):
            raise DataError(
                f"{store.path} has episodes of {wrong[0]} steps, but those of {domain.name} have "
                f"{domain.episode_steps}; leave them out"
            )
        starts = np.arange(0, domain.episode_steps, action_repeat)
        observation, action, features = [], [], []
        for number in range(store.num_episodes) if episodes is None else episodes:
            episode = store.episode(number).episode
            observation.append(scaling.observation(episode.observation[starts]))
            action.append(episode.action[starts + 1])
            found = compute_features(domain, episode.physics[1:], episode.action[1:])
            features.append({name: values.astype(np.float32) for name, values in found.items()})
        stacked = {name: np.stack([each[name] for each in features]) for name in features[0]}
        return cls(np.stack(observation), np.stack(action), Features(stacked), action_repeat)

    def chosen(self, episodes: np.ndarray | slice) -> Self:
        """The trajectories with these numbers."""
        features = Features({name: values[episodes] for name, values in self.features.items()})
        return type(self)(self.observation[episodes], self.action[episodes], features, self.action_repeat)

    def split(self, count: int) -> tuple[Self, Self]:
        """All trajectories but the last ``count``, and these; with 0 both are all.

        Raises:
          DataError: no others are left.
        """
        episodes = len(self.action)
        if count >= episodes:
            raise DataError(
                f"the data has {episodes} trajectories, of which {count} are for evaluation only, so that "
                "none are left to train on; collect more"
            )
        return (self.chosen(slice(-count)), self.chosen(slice(-count, None))) if count else (self, self)

    def step_features(self, episodes: np.ndarray | slice = _ALL) -> Features:
        """Features of all control steps of some trajectories, one after another: float32 [steps] each."""
        return Features({name: values[episodes].ravel() for name, values in self.features.items()})

    def rewards(self, reward: RewardOfFeatures, episodes: np.ndarray | slice = _ALL) -> np.ndarray:
        """Mean reward over the control steps of each decision of some trajectories, float32 [E, D]."""
        each = reward(self.step_features(episodes)).reshape(-1, self._steps)
        return decision_rewards(each, self.action_repeat)

    def state_rewards(
        self, reward: RewardOfFeatures, episode: np.ndarray, decision: np.ndarray
    ) -> np.ndarray:
        """Rewards of the states that decisions observe, float32 [...], for int [...] of both numbers.

        They are those of the last control step before a decision, so that no decision is an episode's first.
        """
        at = episode, decision * self.action_repeat - 1
        features = Features({name: values[at].ravel() for name, values in self.features.items()})
        return reward(features).astype(np.float32).reshape(decision.shape)

    def positions(self, names: Sequence[str]) -> np.ndarray:
        """The position, of these features, after each decision: float32 [E, D, len(names)]."""
        ends = np.cumsum(_decision_steps(self._steps, self.action_repeat)) - 1
        return np.stack([self.features[name][:, ends] for name in names], axis=-1)

    def returns(self, rewards: np.ndarray) -> np.ndarray:
        """Returns float64 [E] of mean rewards [E, D], as ``rewards`` gives them."""
        return rewards.astype(np.float64) @ _decision_steps(self._steps, self.action_repeat)

    @property
    def _steps(self) -> int:
        """Number T of control steps of a trajectory."""
        return next(iter(self.features.values())).shape[1]

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
        with replacing(folder / KEPT_FILE) as beside, beside.open("wb") as file:
            np.savez_compressed(file, **halved)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads those in a folder; None if it has none, a ``DataError`` if they are damaged."""
        path = folder / KEPT_FILE
        if not path.exists():
            return None
        try:
            arrays = {name: values.astype(np.float32) for name, values in read_npz(path, _MOST_BYTES).items()}
            return cls(arrays.pop("observation"), arrays.pop("action"), Features(arrays), 1)
        except (DataError, KeyError) as error:
            raise DataError(f"{path} is damaged: {error}; export the policy again") from error


def decision_rewards(rewards: np.ndarray, action_repeat: int) -> np.ndarray:
    """Mean over the control steps of each decision of rewards [E, T], float32 [E, D]."""
    steps = rewards.shape[1]
    sums = np.add.reduceat(rewards, np.arange(0, steps, action_repeat), axis=1)
    return (sums / _decision_steps(steps, action_repeat)).astype(np.float32)


def _decision_steps(steps: int, action_repeat: int) -> np.ndarray:
    """Control steps of each decision, of which the last may have fewer: int [D]."""
    return np.diff(np.arange(0, steps, action_repeat), append=steps)
