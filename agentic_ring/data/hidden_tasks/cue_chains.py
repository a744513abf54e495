"""Chains of trials of cue tasks, composed of explored trials that are relabelled for the goals of a task.

    cue      a    b    a    a    c    b    a    ...     drawn at random for every trial
    trial    poor DEMO poor DEMO poor DEMO DEMO         for each cue: poor trials in ascending return, then
                                                        demonstrations
    loss     0    4    0    4    0    1    1            on demonstrations only, more on the first one of each
                                                        cue, and only where an action is chosen, not held

Poor trials are partly successful for the cue's goal, or demonstrations for other goals (distractors), or
random. A distractor looks purposeful and earns nothing. Behind poor trials a first demonstration teaches to
search, behind demonstrations the others teach to repeat what was rewarded.
"""

from dataclasses import dataclass

import numpy as np

from agentic_ring.attention.ring.layout import Layout, order, padded_length
from agentic_ring.data.hidden_tasks.cue_task import check_cues, draw_codes
from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.family import CODE_BITS, REWARD_KINDS, RewardKind
from agentic_ring.data.hidden_tasks.ranked_trials import RankedTrials
from agentic_ring.data.store import MINIMUM_STD, Scaling
from agentic_ring.errors import ConfigError, check_at_least_one, check_choice, check_positive

_CHAIN, _COIN, _MISLEADING = range(3)
"""Purposes of random numbers, so that neither coins nor misleading cues change what else is drawn."""


@dataclass(frozen=True)
class CueChainConfig:
    """Composition of the chains of a family.

    Attributes:
      trials: number of trials n in a chain.
      cues: numbers of cues K, of which each chain draws one.
      poor: largest number of poor trials of a cue. A cue that occurs m times in a chain has 0 to
        min(poor, m - 1) of them, each number with equal probability, so that a demonstration always follows.
      action_repeat: number of the family's decisions that one step of a chain spans, whose reward is the mean
        of theirs; explored actions are held for all of them.
      graded, distractors: shares of partly successful trials and of distractors among the poor trials; the
        rest are random.
      misleading: share of the cues whose poor trials are drawn and rewarded for another goal, so that a model
        learns to leave what its context says once rewards speak against it.
      first_demonstration_weight: loss weight of the first demonstration of each cue; that of the others is 1.
      shows_goal: whether each cue's goal is observed beside its code, for the oracle.
      reward_kind: kind of reward; trials are ranked by the dense one in any case.
      seed: seed of the chains.
    """

    family: str
    trials: int
    cues: tuple[int, ...] = (1, 2, 4, 8, 16)
    poor: int = 6
    action_repeat: int = 1
    graded: float = 0.5
    distractors: float = 0.25
    misleading: float = 0.0
    first_demonstration_weight: float = 4.0
    shows_goal: bool = False
    reward_kind: RewardKind = "dense"
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(self, "trials", "action_repeat")
        check_choice(self, "reward_kind", REWARD_KINDS)
        check_positive(self, "first_demonstration_weight")
        if self.seed < 0 or self.poor < 0 or not self.cues:
            raise ConfigError(
                f"seed is {self.seed}, poor is {self.poor} and cues is {self.cues}; the first two must be 0 "
                "or more, and at least one number of cues is needed"
            )
        for cues in self.cues:
            check_cues(cues)
        shares = self.misleading, self.graded, self.distractors
        if min(shares) < 0 or max(self.misleading, self.graded + self.distractors) > 1:
            raise ConfigError(
                f"misleading is {self.misleading}, graded is {self.graded}, distractors {self.distractors}; "
                "shares must be 0 or more and at most 1, the last two together"
            )


@dataclass(frozen=True, eq=False)
class CueChainPlan:
    """The trials of a chain, all [n]."""

    trial: np.ndarray
    """Int, numbers of explored trials."""
    goal: np.ndarray
    """Int, numbers of the goals in the pool, each that of the trial's cue."""
    rewarded_goal: np.ndarray
    """Int, numbers of the goals that rewards are for; others where poor trials mislead."""
    cue: np.ndarray
    """Int, below K."""
    code: np.ndarray
    """float32 [n, 4]."""
    demonstration: np.ndarray
    """Bool, whether the trial is a demonstration."""
    first: np.ndarray
    """Bool, whether it is the first demonstration of its cue."""
    reward: np.ndarray
    """float64 [n, D], reward of each of the family's decisions."""


class CueChains:
    """Makes chains of ranked trials, for a ``ChainPipeline``. Chain k is a function of the seed and k.

    ``scaling`` is that of ``measure_cue_scaling``; ``ring`` devices share a sequence.

    Raises:
      ConfigError: store and configuration are of different families, a chain has more trials than the store,
        a task has more cues than the pool has goals, or a step spans decisions of several explored actions.
    """

    def __init__(
        self,
        store: ExplorationStore,
        ranked: RankedTrials,
        config: CueChainConfig,
        scaling: Scaling,
        ring: int,
        layout: Layout = "zigzag",
    ):
        store.require_family(config.family)
        if config.trials > store.num_trials:
            raise ConfigError(
                f"a chain has {config.trials} trials, but {store.path} has only {store.num_trials}; use "
                "shorter chains, or explore more trials"
            )
        if max(config.cues) > len(ranked.goals):
            raise ConfigError(
                f"a task has {max(config.cues)} cues, but the pool has only {len(ranked.goals)} goals; rank "
                "the trials for a larger pool"
            )
        hold = store.family.hold
        if hold % config.action_repeat:
            raise ConfigError(
                f"action_repeat is {config.action_repeat}, but explored actions of {store.family.name} are "
                f"held for {hold} decisions; use a divisor of {hold}"
            )
        self.store, self.ranked, self.config, self._scaling = store, ranked, config, scaling
        self.layout: Layout = layout
        self._trial_steps = store.family.decisions // config.action_repeat
        self.length = padded_length(config.trials * self._trial_steps, ring, layout)
        self.order = order(layout, self.length, ring)  # as in ``ChainLoader``

    def plan(self, number: int) -> CueChainPlan:
        """Draws the chain with this number."""
        config, ranked = self.config, self.ranked
        random = np.random.default_rng((config.seed, _CHAIN, number))
        cues = int(random.choice(config.cues))
        goals = random.choice(len(ranked.goals), cues, replace=False)
        codes = draw_codes(random, cues)
        cue = random.integers(cues, size=config.trials)
        shown = np.eye(cues, dtype=int)[cue]
        poor = random.integers(np.minimum(config.poor, np.maximum(shown.sum(axis=0) - 1, 0)) + 1)
        occurrence = np.cumsum(shown, axis=0)[np.arange(config.trials), cue] - 1
        demonstration = occurrence >= poor[cue]
        goal = goals[cue]
        # The goals that poor trials of each cue are rewarded for: of some cues not the cue's own.
        misleading = np.random.default_rng((config.seed, _MISLEADING, number))
        others = self._draw_others(misleading, goals)
        believed = np.where(misleading.random(cues) < config.misleading, others, goals)
        rewarded = np.where(demonstration, goal, believed[cue])
        good = _draw_from(random, ranked.demonstrations, goal)
        trial = np.where(demonstration, good, self._draw_poor(random, rewarded))
        reward = self.store.rewards(trial, ranked.goals[rewarded])
        # Poor trials of each cue, in ascending return, to the positions of that cue's poor trials.
        positions = np.flatnonzero(~demonstration)
        positions = positions[np.argsort(cue[positions], kind="stable")]
        ascending = positions[np.lexsort((reward[positions].sum(axis=1), cue[positions]))]
        trial[positions], reward[positions] = trial[ascending], reward[ascending]
        if config.reward_kind == "sparse":
            reward = self.store.rewards(trial, ranked.goals[rewarded], "sparse")
        elif config.reward_kind == "coin":
            coins = np.random.default_rng((config.seed, _COIN, number)).random(reward.shape)
            reward = (coins < reward).astype(np.float64)
        first = occurrence == poor[cue]
        return CueChainPlan(trial, goal, rewarded, cue, codes[cue], demonstration, first, reward)

    def _draw_others(self, random: np.random.Generator, goal: np.ndarray) -> np.ndarray:
        pool = len(self.ranked.goals)
        return (goal + random.integers(1, pool, size=len(goal))) % pool

    def _draw_poor(self, random: np.random.Generator, goal: np.ndarray) -> np.ndarray:
        """Draws a graded trial, a distractor or a random trial for each goal [n]."""
        config = self.config
        distractors = _draw_from(random, self.ranked.demonstrations, self._draw_others(random, goal))
        graded = _draw_from(random, self.ranked.graded, goal)
        anything = random.integers(self.store.num_trials, size=len(goal))
        kind = random.random(len(goal))
        below = [kind < config.graded, kind < config.graded + config.distractors]
        return np.select(below, [graded, distractors], anything)

    def load(self, plan: CueChainPlan, columns: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Returns the steps at ``columns`` of the layout as arrays [columns, ...] by field name."""
        config, family = self.config, self.store.family
        positions = self.order[columns]
        held = positions < len(plan.trial) * self._trial_steps
        shown = self.ranked.goals[plan.goal] / family.goal_scale * config.shows_goal
        observed = np.concatenate([plan.code, shown], axis=1)
        step = np.where(held, positions, 0)
        steps = read_trials(
            self.store, self._scaling, plan.trial, plan.reward, observed, step, config.action_repeat
        )
        weight = np.where(plan.first, config.first_demonstration_weight, plan.demonstration)
        chosen = steps["timestep"] % family.hold == 0
        steps["weight"] = (weight[steps["trajectory"]] * chosen).astype(np.float32)
        for values in steps.values():
            values[~held] = 0
        return {**steps, "position": np.where(held, positions, -1).astype(np.int32)}


def read_trials(
    store: ExplorationStore,
    scaling: Scaling,
    trials: np.ndarray,
    rewards: np.ndarray,
    observed: np.ndarray,
    steps: np.ndarray,
    action_repeat: int = 1,
) -> dict[str, np.ndarray]:
    """Reads explored trials one after another, as steps that span ``action_repeat`` decisions each.

    Args:
      trials: numbers of the trials, int [n].
      rewards: of each decision, [n, D].
      observed: what is observed beside the body: code, and goal or zeros, [n, 4 + G].
      steps: numbers of the steps to read, int [S].

    Returns:
      Fields of ``ChainSteps`` but the position, [S, ...].
    """
    family = store.family
    index, timestep = np.divmod(steps * action_repeat, family.decisions)
    reward = rewards.reshape(-1, action_repeat)[steps].mean(axis=1)
    body = family.observe(store.physics[trials[index], timestep * family.substeps])
    observation = np.concatenate([body, observed[index].astype(np.float32)], axis=1)
    return {
        "observation": scaling.observation(observation).astype(np.float32),
        "action": store.actions[trials[index], timestep],
        "reward": (reward / scaling.reward_scale).astype(np.float32),
        "return_to_go": np.zeros(len(steps), np.float32),
        "completion": np.zeros(len(steps), np.float32),
        "timestep": timestep.astype(np.int32),
        "trajectory": index.astype(np.int32),
    }


def _draw_from(random: np.random.Generator, table: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Draws one of the entries [A, B] of ``table`` [M, A, B] for each goal [n]."""
    _, groups, ranks = table.shape
    return table[goal, random.integers(groups, size=len(goal)), random.integers(ranks, size=len(goal))]


def measure_cue_scaling(store: ExplorationStore) -> Scaling:
    """Measures the scaling of the body's observations on explored trials; codes, goals and rewards stay."""
    family = store.family
    observations = store.observations(np.arange(store.num_trials)).astype(np.float64)
    body = observations.reshape(-1, family.body_dim)
    rest = CODE_BITS + family.goal_dim
    mean = (*body.mean(axis=0).tolist(), *(0.0,) * rest)
    std = (*np.maximum(body.std(axis=0), MINIMUM_STD).tolist(), *(1.0,) * rest)
    return Scaling(mean, std, reward_scale=1.0, return_scale=float(family.decisions))
