"""Hidden tasks: a map from K cues to K goals. A trial shows one cue, and only that cue's goal is rewarded."""

from dataclasses import dataclass

import numpy as np

from agentic_ring.data.hidden_tasks.family import CODE_BITS, CODES, Family, Region
from agentic_ring.errors import ConfigError, UnknownNameError

_CODES = 2.0 * (np.arange(CODES)[:, None] >> np.arange(CODE_BITS) & 1) - 1
# Purposes of random numbers, so that no two of them share a generator.
_TASK, _CUE, _START, _COIN = range(4)


@dataclass(frozen=True, eq=False)
class CueTask:
    """A task of K cues, and all that is random in its trials, by ``seed`` and the trial's number."""

    family: Family
    codes: np.ndarray
    """float32 [K, 4], the observed code of each cue, all different."""
    goals: np.ndarray
    """float64 [K, G], the goal of each cue."""
    seed: int

    def cue(self, trial: int) -> int:
        """Returns the cue that a trial shows, each of the K with equal probability."""
        return int(self._random(_CUE, trial).integers(len(self.goals)))

    def start(self, trial: int) -> np.ndarray:
        """Returns the initial state of a trial, float32 [P]."""
        return self.family.draw_starts(self._random(_START, trial), 1)[0]

    def coin(self, trial: int, decision: int) -> float:
        """Returns a number in [0, 1); a coin's reward is 1 if the dense reward is above it."""
        return self._random(_COIN, trial, decision).random()

    def _random(self, purpose: int, *numbers: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, purpose, *numbers))


def draw_codes(random: np.random.Generator, cues: int) -> np.ndarray:
    """Draws different codes, float32 [cues, 4]."""
    return _CODES[random.permutation(CODES)[:cues]].astype(np.float32)


def draw_cue_task(family: Family, cues: int, seed: int, region: Region = "seen") -> CueTask:
    """Draws a task of ``cues`` cues: codes and goals, all of these in seen or all in unseen regions.

    Raises:
      ConfigError: there are not 1 to 16 cues, the seed is negative, or no region is unseen.
      UnknownNameError: ``region`` is neither "seen" nor "unseen".
    """
    check_cues(cues)
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or more")
    if region not in ("seen", "unseen"):
        raise UnknownNameError("region", region, ("seen", "unseen"))
    random = np.random.default_rng((seed, _TASK))
    return CueTask(family, draw_codes(random, cues), family.draw_goals(random, cues, region), seed)


def check_cues(cues: int) -> None:
    """Raises a ``ConfigError`` if a task cannot have this number of cues."""
    if not 1 <= cues <= CODES:
        raise ConfigError(f"cues is {cues}; a code has {CODE_BITS} bits, so use 1 to {CODES}")
