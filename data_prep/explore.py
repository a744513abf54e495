"""Explores a task family: trials of random actions, without rewards and without any task.

    python -m data_prep.explore --family point_mass

The trials can be relabelled for any goal of the family. An action is random and held for several decisions
(``Family.noise``). MuJoCo steps many trials at once, in threads. The file appears when it is complete: a run
that was stopped starts anew, which takes less than a minute for 200,000 trials of point_mass on 2 cores.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from agentic_ring.data.domains import suite_environment
from agentic_ring.data.hidden_tasks.bodies import family_named
from agentic_ring.data.hidden_tasks.exploration import ExploredTrials, write_exploration
from agentic_ring.data.hidden_tasks.family import TRIAL_DECISIONS, Family
from agentic_ring.data.store import data_root
from agentic_ring.errors import ConfigError, check_at_least_one
from agentic_ring.extras import needs_extra
from agentic_ring.terminal.cli import optional_flag, run
from agentic_ring.terminal.progress import progress

_PART = 2000
"""Trials that are stepped together. Each part has a random generator of its own."""


def exploration_path(root: Path, family: str) -> Path:
    """The trials that explore a task family."""
    return root / "exploration" / f"{family}.h5"


@dataclass(frozen=True)
class ExploreConfig:
    """Settings of an exploration.

    Attributes:
      family: Task family to explore: point_mass or reacher; or such as point_mass-128 with 128 decisions a
        trial.
      trials: Number of trials. Default: 200,000.
      seed: Seed of initial states and actions. Default: 0.
      data: Data folder. Default: $AGENTIC_RING_DATA or ./data.
    """

    family: str
    trials: int = 200_000
    seed: int = 0
    data: Annotated[Path | None, optional_flag()] = None

    def __post_init__(self) -> None:
        family_named(self.family)
        check_at_least_one(self, "trials")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")


def draw_actions(family: Family, random: np.random.Generator, trials: int) -> np.ndarray:
    """Draws held random actions, float32 [trials, D, A]."""
    shape = trials, TRIAL_DECISIONS, family.action_dim
    drawn = (family.noise.gain * random.uniform(-1, 1, shape)).clip(-1, 1)
    drawn[random.random(drawn.shape[:2]) < family.noise.idle] = 0
    redrawn = random.random(drawn.shape[:2]) < family.noise.redraw
    redrawn[:, 0] = True
    source = np.maximum.accumulate(np.where(redrawn, np.arange(TRIAL_DECISIONS), 0), axis=1)
    actions = np.take_along_axis(drawn, source[..., None], axis=1).astype(np.float32)
    return actions.repeat(family.hold, axis=1)


def explore_parts(family: Family, trials: int, seed: int, threads: int) -> Iterator[ExploredTrials]:
    """Yields trials in parts; they do not depend on the number of threads."""
    every = family.physics_steps
    model = suite_environment(*family.suite_task, seed=0).physics.model.ptr
    with needs_extra("rl"):  # after the environment, which says what is wrong with MUJOCO_GL
        import mujoco
        from mujoco.rollout import Rollout

    data = [mujoco.MjData(model) for _ in range(threads)]  # pyright: ignore[reportAttributeAccessIssue]
    rollout = Rollout(nthread=threads)
    for part, first in enumerate(range(0, trials, _PART)):
        random = np.random.default_rng((seed, part))
        starts = family.draw_starts(random, _PART)[: trials - first]
        actions = draw_actions(family, random, _PART)[: trials - first]
        time_and_state = np.pad(starts.astype(np.float64), ((0, 0), (1, 0)))
        control = actions.astype(np.float64).repeat(family.substeps * every, axis=1)
        stepped = np.asarray(rollout.rollout(model, data, time_and_state, control)[0])
        paths = np.concatenate([starts[:, None], stepped[:, every - 1 :: every, 1:]], axis=1)
        yield ExploredTrials(paths.astype(np.float32), actions)


def explore(config: ExploreConfig) -> Path:
    """Writes the exploration store of a family; returns its path."""
    family = family_named(config.family)
    path = exploration_path(config.data or data_root(), config.family)
    with progress("exploring", config.trials) as advance:

        def parts() -> Iterator[ExploredTrials]:
            done = 0
            for part in explore_parts(family, config.trials, config.seed, os.cpu_count() or 1):
                yield part
                advance(done := done + len(part.actions), "trials")

        write_exploration(path, family, config.trials, config.seed, parts())
    return path


def main(config: Annotated[ExploreConfig, tyro.conf.arg(name="")]) -> None:
    """Explores a task family with random actions and stores the trials without rewards."""
    print(f"wrote {config.trials:,} trials to {explore(config)}")


if __name__ == "__main__":
    run(main)
