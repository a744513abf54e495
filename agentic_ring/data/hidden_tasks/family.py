"""What a task family is: a body of dm_control, goals, and a reward that falls with the error to the goal.

A trial is a fixed number of decisions. A decision holds one action for several reward sub-steps, each of
several physics steps, and its reward is the mean over its sub-steps:

    trial     |  decision 0             |  decision 1             | ...
    physics   x0      x1      x2        x3      x4      x5        x6      states that are stored
              | 10 steps      | 10 steps      (point_mass: 3 sub-steps of 10 physics steps)

A reward is a function of a sub-step's first and last state and the goal, and of nothing else. So stored
states can be relabelled for any goal, with exactly the rewards that an environment gives.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from agentic_ring.errors import ConfigError

RewardKind = Literal["dense", "sparse", "coin"]
"""Reward of a decision: "dense", the mean of a reward that falls with the error; "sparse", the share of
sub-steps with full reward; "coin", 1 with the probability that is the dense reward, else 0."""
REWARD_KINDS: tuple[RewardKind, ...] = get_args(RewardKind)
TRIAL_DECISIONS = 8
"""Decisions of a trial, and of the exploring actions, where a family's name does not say another number."""
STANDARD_SUBSTEPS = 3
"""Reward sub-steps in a decision of such trials."""
Region = Literal["seen", "unseen"]
"""Where goals are drawn: in regions that are trained on, or in held-out ones."""


@dataclass(frozen=True)
class HeldNoise:
    """Random actions that are held for several decisions."""

    redraw: float
    """Probability that a decision draws a new action."""
    idle: float
    """Probability that a drawn action is 0."""
    gain: float
    """All others are uniform in [-gain, gain], clipped to [-1, 1]."""


@dataclass(frozen=True)
class Family(ABC):
    """A body and the goals it may be given. P is the length of its physics state, G that of a goal.

    Attributes:
      held_out: regions of goals that are never trained on, to evaluate on goals of unseen regions.
      decisions: decisions D in a trial, a multiple of 8. With more than 8 a decision is shorter, of whole
        physics steps, so that a trial lasts about as long, and it is one reward sub-step. Exploring actions
        are drawn as for 8 decisions and held for D / 8, and so are a model's.

    Raises:
      ConfigError: a held-out region does not exist, no region is left to train on, or the number of decisions
        is no multiple of 8.
    """

    held_out: tuple[int, ...]
    decisions: int = TRIAL_DECISIONS

    body: ClassVar[str]
    """Name of the body, and of the family with trials of 8 decisions."""
    suite_task: ClassVar[tuple[str, str]]
    """Domain and task of dm_control's suite whose physics is stepped, with its actuators as they are."""
    physics_dim: ClassVar[int]
    """P: MuJoCo's qpos and qvel."""
    body_dim: ClassVar[int]
    """Length of the body's observation."""
    action_dim: ClassVar[int]
    goal_dim: ClassVar[int]
    standard_physics_steps: ClassVar[int]
    """Physics steps in a sub-step, of trials of 8 decisions."""
    near: ClassVar[float]
    """Largest error that earns the full reward of 1."""
    far: ClassVar[float]
    """Error from which on the reward is 0; it is linear between ``near`` and ``far``."""
    goal_scale: ClassVar[float]
    """Size of a goal's entries; a goal that a model observes is divided by it."""
    regions: ClassVar[int]
    """Number of regions of goals."""
    start_cells: ClassVar[int]
    """Number of cells of initial states; good trials are chosen for each cell separately."""
    noise: ClassVar[HeldNoise]
    """Actions that explore this body."""

    def __post_init__(self) -> None:
        if self.decisions < 1 or self.decisions % TRIAL_DECISIONS:
            raise ConfigError(
                f"{self.body} cannot have trials of {self.decisions} decisions; use a multiple of "
                f"{TRIAL_DECISIONS}, as explored actions are drawn {TRIAL_DECISIONS} times in a trial"
            )
        if not set(self.held_out) < set(range(self.regions)):
            raise ConfigError(
                f"held_out is {self.held_out}; the regions of {self.name} are 0 to {self.regions - 1}, and "
                "at least one must be left to train on"
            )

    @abstractmethod
    def draw_starts(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws initial states at rest, float32 [count, P]."""

    @abstractmethod
    def start_cell(self, starts: np.ndarray) -> np.ndarray:
        """Returns the cell of each initial state [N, P]: int [N]."""

    @abstractmethod
    def draw_any_goals(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws goals of any region, float64 [count, G]."""

    @abstractmethod
    def region(self, goals: np.ndarray) -> np.ndarray:
        """Returns the region of each goal [N, G]: int [N]."""

    @abstractmethod
    def observe(self, physics: np.ndarray) -> np.ndarray:
        """Returns the body's observations float32 [..., O] of states float32 [..., P]."""

    @abstractmethod
    def outcome(self, paths: np.ndarray) -> np.ndarray:
        """Returns what a goal asks for, in each sub-step of paths float64 [..., S + 1, P]: [..., S, G]."""

    @property
    def name(self) -> str:
        """Name that files and settings carry: point_mass, or point_mass-128 with 128 decisions a trial."""
        return self.body if self.decisions == TRIAL_DECISIONS else f"{self.body}-{self.decisions}"

    @property
    def hold(self) -> int:
        """Decisions for which an action is held: it is chosen 8 times in a trial."""
        return self.decisions // TRIAL_DECISIONS

    @property
    def substeps(self) -> int:
        """Reward sub-steps in a decision."""
        return STANDARD_SUBSTEPS if self.decisions == TRIAL_DECISIONS else 1

    @property
    def physics_steps(self) -> int:
        """Physics steps in a sub-step."""
        if self.decisions == TRIAL_DECISIONS:
            return self.standard_physics_steps
        trial = TRIAL_DECISIONS * STANDARD_SUBSTEPS * self.standard_physics_steps
        return max(1, round(trial / self.decisions))

    @property
    def observation_dim(self) -> int:
        """Length of a model's observation: the body's, the cue's code, and the goal or zeros."""
        return self.body_dim + CODE_BITS + self.goal_dim

    def draw_goals(self, random: np.random.Generator, count: int, region: Region) -> np.ndarray:
        """Draws goals of seen or unseen regions, float64 [count, G]; a ``ConfigError`` if none is unseen."""
        if region == "unseen" and not self.held_out:
            raise ConfigError(f"no region of {self.name} is held out, so there are no unseen goals to draw")
        drawn = np.zeros((0, self.goal_dim))
        while len(drawn) < count:
            goals = self.draw_any_goals(random, 2 * count + 8)
            unseen = np.isin(self.region(goals), self.held_out)
            drawn = np.concatenate([drawn, goals[unseen == (region == "unseen")]])
        return drawn[:count]

    def rewards(self, paths: np.ndarray, goals: np.ndarray, kind: RewardKind) -> np.ndarray:
        """Returns the rewards of decisions, float64 [..., T]; for "coin" the probabilities of a reward of 1.

        Args:
          paths: states float32 [..., T x substeps + 1, P] of T consecutive decisions, from the first
            decision's start to the last one's end.
          goals: float64 [..., G].
        """
        error = self.error(self.outcomes(paths), goals[..., None, :])
        reward = (error <= self.near) if kind == "sparse" else self.dense(error)
        return reward.reshape(*reward.shape[:-1], -1, self.substeps).mean(axis=-1)

    def outcomes(self, paths: np.ndarray) -> np.ndarray:
        """Returns ``outcome`` of paths in the precision that is stored, float64 [..., S, G]."""
        return self.outcome(np.asarray(paths, np.float32).astype(np.float64))

    def error(self, outcomes: Any, goals: Any) -> Any:
        """Returns the distances of outcomes [..., G] from goals [..., G]; NumPy or JAX arrays."""
        squares = (outcomes - goals) ** 2
        total = squares[..., 0]
        for axis in range(1, self.goal_dim):
            total = total + squares[..., axis]
        return total.__array_namespace__().sqrt(total)

    def dense(self, error: Any) -> Any:
        """Returns the reward in [0, 1] for an error: 1 up to ``near``, linear, 0 from ``far`` on."""
        return ((self.far - error) / (self.far - self.near)).clip(0.0, 1.0)


CODE_BITS = 4
"""Length of a cue's code, whose entries are -1 or 1."""
CODES = 2**CODE_BITS
"""Number of codes, and so the largest number of cues in a task."""
