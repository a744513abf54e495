"""A user's reward: a function of the features, in a file of the user's own.

def hop(features):  # name -> float64 [R], see features.py
    return features["torso_height"] * (features["vertical_velocity"] > 0.5)
"""

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentic_ring.data.rewards.features import Features
from agentic_ring.errors import AgenticRingError, ArgumentError, DataError, UnknownNameError


@dataclass(frozen=True)
class UserReward:
    """A function of features whose results are checked; ``load_reward`` makes one."""

    name: str
    """``FILE.py:function``."""
    function: Callable[[Features], Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return load_reward, (self.name,)  # another process cannot import the function from its file

    def __call__(self, features: Features) -> np.ndarray:
        """Returns the reward of each of R states, float64 [R].

        Raises:
          UnknownNameError: the function reads a feature that does not exist; the error lists those that do.
          ArgumentError: the function fails, or does not return R finite numbers.
        """
        rows = len(next(iter(features.values())))
        try:
            rewards = np.asarray(self.function(Features(features)), np.float64)
        except AgenticRingError:
            raise
        except Exception as error:  # it may raise anything
            raise ArgumentError(
                f"{self.name} fails with {type(error).__name__}: {error}; it must return a number for each "
                f"of the {rows} rows"
            ) from error
        if rewards.shape != (rows,):
            raise ArgumentError(
                f"{self.name} returns shape {rewards.shape}, expected {(rows,)}: a number for each row; use "
                "NumPy's functions, which take all rows at once"
            )
        if not np.isfinite(rewards).all():
            row = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ArgumentError(f"{self.name} returns {rewards[row]} in row {row}; rewards must be finite")
        return rewards

    def require_variation(self, features: Features) -> None:
        """Raises a ``DataError`` if the reward is the same in all rows, so that nothing can be learned."""
        require_variation(self.name, self(features))


def require_variation(name: str, rewards: np.ndarray) -> None:
    """Raises a ``DataError`` if the rewards in stored data are all the same."""
    if not np.ptp(rewards):
        raise DataError(
            f"{name} is {rewards.flat[0]:g} in all {rewards.size} rows of the data, so no trajectory is "
            "better than another; reward what the data reaches, or use data that reaches it"
        )


def load_reward(name: str) -> UserReward:
    """Runs a Python file and returns its reward function.

    Args:
      name: ``FILE.py:function``.

    Raises:
      ArgumentError: the name has another form.
      DataError: there is no such file, or it fails.
      UnknownNameError: the file has no such function; the error lists those that it has.
    """
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise ArgumentError(f"the reward is {name!r}; write FILE.py:function, such as my_rewards.py:hop")
    try:
        content = runpy.run_path(path)
    except Exception as error:  # it may raise anything
        raise DataError(f"{path} fails with {type(error).__name__}: {error}; correct it") from error
    functions = {key: each for key, each in content.items() if callable(each) and not key.startswith("_")}
    if function not in functions:
        raise UnknownNameError(f"function of {path}", function, tuple(functions))
    return UserReward(name, functions[function])
