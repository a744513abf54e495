"""An explorer whose episodes each have a skill: drawn at the start, seen by the learner throughout."""

from typing import Any

import numpy as np

from data_prep.collectors.explorer import Explorer


class SkillExplorer:
    """Shows ``explorer`` observations [E, O + S] that end in the skill, one-hot; see ``Explorer``."""

    def __init__(self, explorer: Explorer, skills: int):
        self._explorer, self._skills = explorer, skills

    def begin_round(self, generator: np.random.Generator, observation: np.ndarray) -> None:
        self._skill = generator.integers(self._skills, size=len(observation))
        self._explorer.begin_round(generator, self._with_skill(observation))

    def act(self, observation: np.ndarray) -> np.ndarray:
        return self._explorer.act(self._with_skill(observation))

    def learn(self) -> None:
        self._explorer.learn()

    def observe(self, action: np.ndarray, reward: np.ndarray, observation: np.ndarray) -> None:
        self._explorer.observe(action, reward, self._with_skill(observation))

    def state(self) -> Any:
        return self._explorer.state()

    def restore(self, state: Any) -> None:
        self._explorer.restore(state)

    def labels(self) -> list[dict[str, Any]]:
        labels = self._explorer.labels()
        return [label | {"skill": int(skill)} for label, skill in zip(labels, self._skill, strict=True)]

    def _with_skill(self, observation: np.ndarray) -> np.ndarray:
        return append_skill(observation, self._skill, self._skills)


def append_skill(observation: np.ndarray, skill: np.ndarray | int, skills: int) -> np.ndarray:
    """[N, O] -> [N, O + S]: the skill of each observation, or of all of them, stands one-hot behind it."""
    one_hot = np.eye(skills, dtype=np.float32)[np.broadcast_to(skill, len(observation))]
    return np.concatenate([observation, one_hot], -1)
