"""Chains in which stored trajectories, relabelled with a reward function, tell the task.

    s s s s s | s s s s s | d d d | s s s s s | ...        s  known step: a span of a stored trajectory
    trajectory  trajectory          trajectory             d  decision to learn

A chain draws a reward function and relabels its trajectories with it; nothing else says which one it is.
Decisions stand after 0 to n of the trajectories and attend to all known steps before them, and to no other
decision: one chain trains contexts of several lengths. They are drawn from the chain's trajectories and some
hundred others, in proportion to exp(advantage) under the reward function, the advantage being the discounted
return that followed less what is usual in such a state; the best count alike, as few decisions would have all
the weight. These tell what to do in a state from which one may go either way. Where a state tells by itself
what was done, as in the middle of a run, the advantage is that of noise: so a share is drawn in proportion to
exp(return), which is high where the reward function is done well.

Rewards are told in deviations from their mean over stored trajectories (``RewardScale``). Goals, which most
trajectories never meet, are told on a fixed scale: a deviation would tell how rare they are. Known steps then
show where a span was rewarded, and decisions are drawn from the whole data by ``goal_distances``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import numpy as np

from agentic_ring.attention.ring.layout import Layout, order, padded_length
from agentic_ring.data.goal_distances import GoalDistances
from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.spans import Shown, span_edges, span_fields
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.errors import ConfigError, check_at_least_one, check_positive
from agentic_ring.extras import needs_extra

with needs_extra("models"):
    from threadpoolctl import ThreadpoolController

_LAST_SHARE = 0.005
"""Of trajectories that are chosen because they meet the goal, in the last guided chain."""


@dataclass(frozen=True)
class ToldChainConfig:
    """Composition of the chains."""

    trajectories: int = 128
    """Number of trajectories n of a chain; with 0 nothing is told."""
    spans: int = 5
    """Known steps for each of them."""
    decisions: int = 768
    """Decisions to learn, in ``groups`` of as many."""
    groups: int = 6
    action_repeat: int = 1
    """Control steps per decision."""
    sharpness: float = 3.0
    """Factor of the advantage, in deviations, in the exponent of a decision's weight."""
    highest: float = 2.5
    """Advantage, in deviations, from which on all decisions have the same weight."""
    discount: float = 0.98
    """Discount per decision."""
    noise: float = 0.15
    """Deviation of what is added to the normalised observations of decisions to learn, so that few of them
    are not learned by heart. More than a body's states differ where it begins to move hides from the model
    which way it leans: with 0.15 a quarter of the cheetahs fell."""
    untold: float = 0.3
    """Share of chains that tell nothing, because their rewards are all zero or shuffled: there the model
    learns to act as it does without a context."""
    pool: int = 640
    """Trajectories whose decisions are learned, those of the chain among them; goals have all of the data."""
    candidates: int = 20
    """Decisions of the pool, for each one to learn, among which those of a chain are drawn."""
    by_return: float = 0.5
    """Share of the decisions to learn that are drawn by return as well as by advantage."""
    task_share: float = 0.0
    """Share of chains that are told a task of the domain; with 0 no task is trained on."""
    goals: bool = False
    """Whether the rewards are goals, rewarded nowhere else."""
    guided: int = 0
    """With goals, number of chains at the beginning of training: in the first all trajectories meet the goal,
    in later ones fewer and fewer. Where few do, reading them is learned late or never."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = "spans", "decisions", "groups", "action_repeat", "pool", "candidates"
        check_at_least_one(self, *counts)
        check_positive(self, "sharpness", "highest")
        shares = {name: getattr(self, name) for name in ("untold", "by_return", "task_share")}
        if self.noise < 0 or not all(0 <= share < 1 for share in shares.values()):
            raise ConfigError(
                f"noise is {self.noise}, and shares are {shares}; expected 0 or more, and shares in [0, 1)"
            )
        if (
            min(self.seed, self.trajectories, self.guided) < 0
            or self.decisions % self.groups
            or not 0 < self.discount < 1
        ):
            raise ConfigError(
                f"seed is {self.seed}, trajectories {self.trajectories}, guided {self.guided}, decisions "
                f"{self.decisions}, groups {self.groups} and discount {self.discount}; the first three must "
                "be 0 or more, the groups equal, the discount in (0, 1)"
            )

    @property
    def steps(self) -> int:
        """Number of steps of a chain, known ones and decisions."""
        return self.trajectories * self.spans + self.decisions

    @property
    def shown(self) -> Shown:
        """Which decision of its span a known step shows."""
        return "best" if self.goals else "middle"

    def scale(self, rewards: np.ndarray) -> "RewardScale":
        """How rewards of stored trajectories are told."""
        return GOAL_SCALE if self.goals else RewardScale.of(rewards)


class RewardScale(NamedTuple):
    """How a reward function is told: in deviations from its mean.

    Functions differ by orders of magnitude, and what matters in each is where it is high.
    """

    mean: np.ndarray | float
    deviation: np.ndarray | float

    @classmethod
    def of(cls, rewards: np.ndarray) -> Self:
        """The scale of rewards in stored trajectories, which may be all alike."""
        return cls(float(rewards.mean()), max(float(rewards.std()), 1e-3 * float(np.ptp(rewards)), 1e-12))

    def __call__(self, rewards: np.ndarray) -> np.ndarray:
        """Rewards as the model reads them, float32."""
        return ((rewards - self.mean) / self.deviation).astype(np.float32)


AS_IT_IS = RewardScale(0.0, 1.0)
GOAL_SCALE = RewardScale(0.0, 0.4)
"""Of goals, which many a decision passes in a part of its control steps."""


@dataclass(frozen=True, eq=False)
class ToldPlan:
    """A chain before its steps are read."""

    episodes: np.ndarray
    """int [n], its trajectories."""
    rewards: np.ndarray
    """float32 [n, D], the mean reward in each decision that they tell, in deviations."""
    after: np.ndarray
    """int [groups], ascending: the number of trajectories before each group of decisions."""
    learned: np.ndarray
    """int [decisions, 2], episode and number of each decision to learn."""
    observation: np.ndarray
    """float32 [decisions, O], what it observes, with noise."""


class ToldChains:
    """Makes the chains, for a ``ChainPipeline``. Chain k is a function of the seed and k.

    Args:
      data: the store's decisions.
      rewards: reward functions, of which a chain draws one.
      distances: those of the same data and rewards, if these are goals.
      tasks: how many of the rewards, the last ones, are tasks, of which ``task_share`` of chains draw one.

    Raises:
      ConfigError: there is no reward function, a chain has more trajectories than the data, or a trajectory
        fewer decisions than spans.
    """

    def __init__(
        self,
        data: ToldDecisions,
        rewards: Sequence[RewardOfFeatures],
        config: ToldChainConfig,
        ring: int,
        layout: Layout = "zigzag",
        distances: GoalDistances | None = None,
        tasks: int = 0,
    ):
        episodes, decisions = data.action.shape[:2]
        span_edges(decisions, config.spans)
        if len(rewards) <= tasks or config.trajectories > episodes:
            raise ConfigError(
                f"chains of {config.trajectories} trajectories for {len(rewards) - tasks} reward functions; "
                f"the data has {episodes} episodes, and at least one function is needed"
            )
        self._data, self._rewards, self._config, self._distances = data, rewards, config, distances
        self._tasks = tasks
        self.layout: Layout = layout
        self.length = padded_length(config.steps, ring, layout)
        self.order = order(layout, self.length, ring)  # as in ``ChainLoader``

    def plan(self, number: int) -> ToldPlan:
        """Draws the chain with this number."""
        config, data = self._config, self._data
        random = np.random.default_rng((config.seed, number))
        drawn = int(random.integers(len(self._rewards) - self._tasks))
        if self._tasks and random.random() < config.task_share:
            drawn = len(self._rewards) - 1 - int(random.integers(self._tasks))
        reward = self._rewards[drawn]
        episodes = self._draw_trajectories(random, number, drawn)
        rewards = data.rewards(reward, episodes)
        # As in evaluation, a context has the scale of its own trajectories, if these are not few.
        rewards = config.scale(rewards[: max(config.trajectories, 64)])(rewards)
        after = np.sort(self._draw_lengths(random))
        if self._distances is None:
            learned = self._draw_decisions(random, episodes, rewards)
        else:
            learned = self._distances.draw(random, drawn, config.decisions)
        told = rewards[: config.trajectories]
        if random.random() < config.untold:
            shuffled = random.permuted(told.ravel()).reshape(told.shape)
            told = shuffled if random.random() < 0.5 else np.zeros_like(told)
        seen = data.observation[tuple(learned.T)]
        seen = seen + config.noise * random.standard_normal(seen.shape, np.float32)
        return ToldPlan(episodes[: config.trajectories], told, after, learned, seen)

    def _draw_trajectories(self, random: np.random.Generator, number: int, reward: int) -> np.ndarray:
        """Those of a chain, followed by the rest of its pool; see ``guided``."""
        config, episodes = self._config, random.permutation(len(self._data.action))
        if self._distances is None:
            return episodes[: max(config.trajectories, config.pool)]
        if number < config.guided:
            meeting = random.permutation(self._distances.meeting[reward])
            guides = meeting[: random.binomial(config.trajectories, _LAST_SHARE ** (number / config.guided))]
            others = episodes[np.isin(episodes, guides, invert=True)]
            chosen = np.concatenate([guides, others[: config.trajectories - len(guides)]])
            return random.permutation(chosen)
        return episodes[: config.trajectories]

    def _draw_lengths(self, random: np.random.Generator) -> np.ndarray:
        """Contexts for the groups: half have all, the others evenly over the logarithm, and none for some.

        With goals, which short contexts never meet, one has all and the others evenly.
        """
        longest, groups = self._config.trajectories, self._config.groups
        if self._config.goals:
            drawn, full = random.integers(0, longest + 1, groups), 1
        else:
            drawn = np.floor(np.exp(random.uniform(0, np.log(longest + 1), groups))).astype(int)
            full = (groups + 1) // 2
        drawn = np.minimum(drawn, longest)
        drawn[random.random(len(drawn)) < 0.15] = 0
        drawn[:full] = longest
        return drawn

    def _draw_decisions(
        self, random: np.random.Generator, episodes: np.ndarray, rewards: np.ndarray
    ) -> np.ndarray:
        config, data = self._config, self._data
        returns = discounted_returns(rewards, config.discount)
        candidates = config.candidates * config.decisions
        row, decision = np.divmod(random.integers(returns.size, size=candidates), returns.shape[1])
        found = returns[row, decision]
        usual = value_of_states(random, data.observation[episodes[row], decision], found)

        def in_deviations(values: np.ndarray) -> np.ndarray:
            return np.minimum(values / max(float(values.std()), 1e-6), config.highest)

        advantage, level = in_deviations(found - usual), in_deviations(found - found.mean())
        second = round(config.by_return * config.decisions)
        chosen = []
        for exponent, count in (
            (config.sharpness * advantage, config.decisions - second),
            (config.sharpness * level + advantage, second),
        ):
            weights = np.exp(exponent)
            chosen.append(random.choice(candidates, count, p=weights / weights.sum()))
        # All groups of decisions have some of both.
        learned = random.permutation(np.concatenate(chosen))
        return np.stack([episodes[row[learned]], decision[learned]], axis=1)

    def load(self, plan: ToldPlan, columns: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Returns the steps at ``columns`` of the layout as arrays [columns, ...] by field name."""
        config, data = self._config, self._data
        stored = data.observation[plan.episodes], data.action[plan.episodes], plan.rewards
        known = span_fields(*stored, config.spans, config.shown)
        known["trajectory"] = np.arange(config.trajectories).repeat(config.spans).reshape(-1, config.spans)
        episode, number = plan.learned.T
        own = {"observation": plan.observation, "action": data.action[episode, number]}
        own["trajectory"] = np.full(config.decisions, -1)
        at = np.repeat(plan.after * config.spans, config.decisions // config.groups)
        places = self.order[columns]
        held = places < config.steps
        steps: dict[str, np.ndarray] = {}
        for name, values in known.items():
            rows = values.reshape(-1, *values.shape[2:])
            chain = np.insert(rows, at, own.get(name, 0), axis=0)
            steps[name] = chain[places * held].astype(np.int32 if rows.dtype.kind == "i" else np.float32)
            steps[name][~held] = 0
        nothing = np.zeros(len(places), np.float32)
        return steps | {
            "weight": (held & (steps["trajectory"] < 0)).astype(np.float32),
            "position": np.where(held, places, -1).astype(np.int32),
            "return_to_go": nothing,
            "completion": nothing,
        }


def discounted_returns(rewards: np.ndarray, discount: float) -> np.ndarray:
    """What follows each decision, times 1 - discount: rewards [E, D] -> float32 [E, D].

    After an episode's end the mean reward of its last fifth goes on.
    """
    tail = rewards.shape[1] // 5 or 1
    found, following = np.empty_like(rewards), rewards[:, -tail:].mean(axis=1)
    for decision in reversed(range(rewards.shape[1])):
        following = (1 - discount) * rewards[:, decision] + discount * following
        found[:, decision] = following
    return found


def value_of_states(random: np.random.Generator, observation: np.ndarray, returns: np.ndarray) -> np.ndarray:
    """Ridge regression of returns [N] on random features of normalised observations [N, O]: float32 [N]."""
    # The threads of BLAS would take the cores from training, which runs at the same time.
    with _threads().limit(limits=1, user_api="blas"):
        return _regression(random, observation, returns)


@cache
def _threads() -> ThreadpoolController:
    return ThreadpoolController()


def _regression(random: np.random.Generator, observation: np.ndarray, returns: np.ndarray) -> np.ndarray:
    rows, width = observation.shape
    observed = np.clip(observation, -5, 5)
    weights = random.normal(0, 0.4, (width, 128)).astype(np.float32)
    bias = random.uniform(-1, 1, 128).astype(np.float32)
    hidden = np.tanh(observed @ weights + bias)
    inputs = np.concatenate([hidden, observed, np.ones((rows, 1), np.float32)], axis=1)
    gram = inputs.T @ inputs + 1e-3 * rows * np.eye(inputs.shape[1], dtype=np.float32)
    return inputs @ np.linalg.solve(gram, inputs.T @ returns)
