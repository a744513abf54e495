"""Random reward functions of a domain, so that a model learns to read from trajectories what is rewarded.

    walker, cheetah, quadruped   a posture (standing at some height, low, inverted or any) times a movement: a
                                 speed, a turn, a height, a lean, a joint or a foot
    cartpole                     the pole up, down or anywhere, times a position or velocity
    point_mass_maze, jaco        a goal: 1 within a radius of a position, 0 elsewhere

All but goals are negated (1 - reward) with probability 0.25 and cut to 0 and 1 with probability 0.35.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypeVar, get_args

import numpy as np

from agentic_ring.data.domains import Domain
from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.tasks import POSITIONS, distance, tolerance
from agentic_ring.errors import ArgumentError, ConfigError

Side = Literal["near", "above", "below"]
Sigmoid = Literal[
    "gaussian", "hyperbolic", "long_tail", "reciprocal", "cosine", "linear", "quadratic", "tanh_squared"
]
Option = TypeVar("Option")
_NEGATED, _SPARSE = 0.25, 0.35
GOAL_RADII = {"point_mass_maze": 0.02, "jaco": 0.05}
"""Distance from a drawn goal, in metres, within which the reward is 1."""
# Ranges and thresholds are measured on at most so many rows.
_MEASURED_ROWS = 10_000

# Feature, side, and between which shares of the feature's range the target lies; None for no posture.
_POLE = ("pole_angle_cosine", "above", 0.5, 1.0), ("pole_angle_cosine", "below", 0.0, 0.5), None
_STANDING, _LOW = ("torso_height", "above", 0.5, 1.0), ("torso_height", "below", 0.0, 0.4)
# Standing, speed and turning stand here more than once: they are what is rewarded most often.
_TORSO = _STANDING, _STANDING, _LOW, ("torso_upright", "below", 0.0, 0.3), None
# Features that move. A group is drawn first, so that six joints are drawn as often as one speed.
_PLANAR = (
    *(("horizontal_velocity",),) * 3,
    *(("angular_momentum",),) * 2,
    *(("vertical_velocity",), ("torso_height",)),
    ("torso_upright", "torso_lean"),
)
_WALKER_LEGS = (
    ("right_hip", "right_knee", "right_ankle", "left_hip", "left_knee", "left_ankle"),
    ("right_foot_height", "left_foot_height"),
)
_CHEETAH_LEGS = ("bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"), ("bfoot_height", "ffoot_height")
_QUADRUPED = (
    *(("forward_velocity",),) * 3,
    *(("lateral_velocity",), ("upward_velocity",), ("yaw_velocity",)),
    *(("roll_velocity", "pitch_velocity"), ("torso_height", "center_of_mass_height")),
    tuple(f"toe_{end}_{side}_height" for end in ("front", "back") for side in ("left", "right")),
)
_CARTPOLE = ("cart_x",), ("cart_x_velocity",), ("pole_angle_velocity",), ("pole_angle_sine",)
_MOVEMENTS = {
    "walker": (_TORSO, (*_PLANAR, *_WALKER_LEGS)),
    "cheetah": (_TORSO, (*_PLANAR, *_CHEETAH_LEGS)),
    "quadruped": (_TORSO, _QUADRUPED),
    "cartpole": (_POLE, _CARTPOLE),
}


@dataclass(frozen=True)
class Term:
    """1 where features are near, above or below a target, falling to 0.1 at a distance of ``margin``.

    Raises:
      ConfigError: target and features do not fit together, or a margin or radius is negative.
    """

    features: tuple[str, ...]
    """One name, or with ``side`` "near" several: a position."""
    target: tuple[float, ...]
    """A value for each feature, in its unit."""
    side: Side
    margin: float
    """In units of the features, as is ``radius``; 0 for no reward beside the bounds."""
    radius: float = 0.0
    """Largest distance from the target that is near."""
    sigmoid: Sigmoid = "gaussian"

    def __post_init__(self) -> None:
        count = len(self.features)
        fits = count == 1 or (count > 1 and self.side == "near")
        if not fits or len(self.target) != count or min(self.margin, self.radius) < 0:
            raise ConfigError(
                f"{self} is no term; it needs one feature (several only with side 'near'), a target value "
                "for each, and a margin and radius of at least 0"
            )

    def __call__(self, features: Features) -> np.ndarray:
        """Returns values in [0, 1], float64 [R]."""
        if self.side == "near":
            values, bounds = distance(features, self.features, self.target), (0.0, self.radius)
        else:
            values, target = features[self.features[0]], self.target[0]
            bounds = (target, inf) if self.side == "above" else (-inf, target)
        return tolerance(values, bounds, self.margin, sigmoid=self.sigmoid)


@dataclass(frozen=True)
class RewardFunction:
    """A product of terms, which may be negated and then cut.

    ``dataclasses.asdict`` gives what JSON holds, from which ``files.json_files`` reads the same function.
    """

    terms: tuple[Term, ...]
    negated: bool = False
    """Whether it is 1 less the product."""
    threshold: float | None = None
    """If given, the reward is 1 at this value and above, 0 below."""

    def __call__(self, features: Features) -> np.ndarray:
        """Returns rewards in [0, 1], float64 [R]; an ``UnknownNameError`` if a feature does not exist."""
        product = np.prod([term(features) for term in self.terms], axis=0)
        values = 1 - product if self.negated else product
        return values if self.threshold is None else (values >= self.threshold).astype(np.float64)

    @property
    def goal(self) -> tuple[float, ...] | None:
        """The position that is rewarded, if nothing else is."""
        only_position = len(self.terms) == 1 and len(self.terms[0].features) > 1 and not self.negated
        return self.terms[0].target if only_position else None


def draw_rewards(
    domain: Domain, features: Features, count: int, seed: int, radius: float | None = None
) -> list[RewardFunction]:
    """Draws ``count`` reward functions of ``domain``; the same ones for the same arguments.

    Targets lie within the range of the given features [R]; margins are 0.1 to 1 of it. Goals are positions of
    these rows, drawn evenly over the space that they visit.

    Args:
      radius: Distance from a goal, in metres, within which the reward is 1. Default: 0.02 in the maze, 0.05
        for Jaco.

    Raises:
      ArgumentError: the domain has no goals but a radius is given, or the radius is not above 0.
    """
    random = np.random.default_rng(seed)
    has_goals = domain.name in POSITIONS
    if radius is not None and not (has_goals and radius > 0):
        wanted = (
            "use a number of metres above 0" if has_goals else f"{domain.name} has no goals: leave it out"
        )
        raise ArgumentError(f"radius is {radius}; {wanted}")
    if has_goals:
        return _draw_goals(random, domain, features, count, radius or GOAL_RADII[domain.name])
    rows = len(next(iter(features.values())))
    measured = Features({name: values[:: -(-rows // _MEASURED_ROWS)] for name, values in features.items()})
    return [_draw_movement(random, domain, measured) for _ in range(count)]


def _draw_goals(
    random: np.random.Generator, domain: Domain, features: Features, count: int, radius: float
) -> list[RewardFunction]:
    names = POSITIONS[domain.name]
    positions = np.stack([features[name] for name in names], axis=-1)
    # Every visited cell of this width is as probable as any other, however often it was visited.
    cells = np.floor(positions / radius)
    _, cell, visits = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    weights = 1 / visits[cell]
    goals = positions[random.choice(len(positions), count, p=weights / weights.sum())].tolist()
    return [goal_reward(domain, goal, radius) for goal in goals]


def goal_reward(domain: Domain, goal: Sequence[float], radius: float | None = None) -> RewardFunction:
    """The reward function of a position in metres; ``radius`` as in ``draw_rewards``."""
    term = Term(POSITIONS[domain.name], tuple(goal), "near", 0.0, radius or GOAL_RADII[domain.name])
    return RewardFunction((term,))


def _draw_movement(random: np.random.Generator, domain: Domain, features: Features) -> RewardFunction:
    postures, groups = _MOVEMENTS[domain.name]
    posture, group = _pick(random, postures), _pick(random, groups)
    terms = [] if posture is None else [_draw_term(random, features, *posture)]
    terms.append(_draw_term(random, features, _pick(random, group), _pick(random, get_args(Side)), 0.0, 1.0))
    reward = RewardFunction(tuple(terms), negated=random.random() < _NEGATED)
    if random.random() >= _SPARSE:
        return reward
    values = reward(features)
    # A constant reward stays one; of others at most half of the rows above the minimum are rewarded.
    higher = values[values > values.min()] if np.ptp(values) else values
    return replace(reward, threshold=float(np.quantile(higher, random.uniform(0.5, 0.98))))


def _draw_term(
    random: np.random.Generator, features: Features, name: str, side: Side, lowest: float, highest: float
) -> Term:
    """A term whose target lies between two shares of the range that 98% of the feature's values span."""
    low, high = np.quantile(features[name], (0.01, 0.99))
    span = float(high - low)
    target = float(low) + span * random.uniform(lowest, highest)
    margin = span * 10 ** random.uniform(-1, 0)
    radius = span * random.uniform(0.02, 0.1) if side == "near" else 0.0
    return Term((name,), (target,), side, margin, radius, _pick(random, get_args(Sigmoid)))


def _pick(random: np.random.Generator, options: Sequence[Option]) -> Option:
    return options[int(random.integers(len(options)))]
