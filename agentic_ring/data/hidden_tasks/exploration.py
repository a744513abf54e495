"""Stores of exploration: trials of random actions without rewards, which can be relabelled for any goal."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from agentic_ring.data.hidden_tasks.bodies import family_named
from agentic_ring.data.hidden_tasks.family import Family, RewardKind
from agentic_ring.data.sealed_hdf5 import FileKind, SealedReader, write_sealed
from agentic_ring.errors import ConfigError

EXPLORATION = FileKind(
    name="agentic_ring exploration store",
    version=1,
    noun="exploration store",
    command="python -m data_prep.explore --family point_mass",
    rewrite="write it again with `python -m data_prep.explore`",
)


@dataclass(frozen=True)
class ExploredTrials:
    """Consecutive trials of a family, which start at rest."""

    physics: np.ndarray
    """float32 [N, D x substeps + 1, P], states at the start and after each reward sub-step."""
    actions: np.ndarray
    """float32 [N, D, A] in [-1, 1], held for a decision each."""


class ExplorationStore(SealedReader):
    """Read access to a store of exploration; a context manager. Trials are read into memory when needed.

    Attributes:
      seed: seed of the initial states and actions of the trials.
      num_trials: number of trials N.
    """

    kind = EXPLORATION

    def _read_tables(self) -> None:
        self.family: Family = family_named(str(self._file.attrs["family"]))
        self.seed = int(np.asarray(self._file.attrs["seed"]))
        family = self.family
        self.num_trials: int = self._file["actions"].shape[0]  # pyright: ignore[reportAttributeAccessIssue]
        for name, expected in _shapes(family, self.num_trials).items():
            shape = self._file[name].shape  # pyright: ignore[reportAttributeAccessIssue]
            if shape != expected:
                raise ValueError(f"its {name} have shape {shape}, those of {family.name} have {expected}")

    @property
    def digest(self) -> str:
        """The digest of all trials that stands in the file's header."""
        return self._header["blake2b"]

    @cached_property
    def _trials(self) -> ExploredTrials:
        self.verify()  # HDF5 has no checksums of the trials
        return ExploredTrials(np.asarray(self._file["physics"]), np.asarray(self._file["actions"]))

    @property
    def physics(self) -> np.ndarray:
        """States of all trials, float32 [N, D x substeps + 1, P]; a ``StoreError`` if a byte has changed."""
        return self._trials.physics

    @property
    def actions(self) -> np.ndarray:
        """Actions of all trials, float32 [N, D, A]; raises as ``physics``."""
        return self._trials.actions

    def observations(self, trials: np.ndarray) -> np.ndarray:
        """Returns the body's observation at each decision of ``trials`` [...]: float32 [..., D, O]."""
        return self.family.observe(self.physics[trials][..., : -1 : self.family.substeps, :])

    def rewards(self, trials: np.ndarray, goals: np.ndarray, kind: RewardKind = "dense") -> np.ndarray:
        """Returns exactly the rewards that the environments give for the same starts and actions: [..., D].

        ``trials`` are numbers [...] and ``goals`` [..., G]; see ``Family.rewards``.
        """
        return self.family.rewards(self.physics[trials], goals, kind)

    def require_family(self, name: str) -> None:
        """Raises a ``ConfigError`` if the trials are of another family than the one with this name."""
        if self.family.name != name:
            raise ConfigError(
                f"{self.path} holds trials of {self.family.name}, but chains of {name} are requested; "
                f"explore with `python -m data_prep.explore --family {name}`"
            )


def _shapes(family: Family, trials: int) -> dict[str, tuple[int, int, int]]:
    states = family.decisions * family.substeps + 1
    return {
        "physics": (trials, states, family.physics_dim),
        "actions": (trials, family.decisions, family.action_dim),
    }


def write_exploration(
    path: Path, family: Family, trials: int, seed: int, parts: Iterable[ExploredTrials]
) -> None:
    """Writes a store of exploration, or replaces the one at ``path`` once all parts are written.

    ``trials`` is the number of trials of all parts together; memory holds one part at a time.

    Raises:
      OSError: the disk is full.
    """
    with write_sealed(path, EXPLORATION) as (file, check_disk):
        file.attrs["family"] = family.name
        file.attrs["seed"] = seed
        physics, actions = (
            file.create_dataset(name, shape, np.float32) for name, shape in _shapes(family, trials).items()
        )
        first = 0
        for part in parts:
            rows = slice(first, first + len(part.actions))
            physics[rows], actions[rows] = part.physics, part.actions
            first = rows.stop
            check_disk()
