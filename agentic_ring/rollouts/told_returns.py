"""Returns of a model that relabelled trajectories tell the task, with controls and other policies.

Environment e has stored trajectories of its own; a context of n is the first n of them. All rewards are told
in deviations over the largest context, also where nothing is stored; see ``ToldChainConfig.scale`` for goals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.domains import parse_task
from agentic_ring.data.recorded_environments import Environments, open_environments
from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.told_chains import RewardScale, ToldChainConfig
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.told_policy import TEMPERATURE, ToldPolicy, told_prompt
from agentic_ring.models.model import Model, Params
from agentic_ring.provenance import usable_cores
from agentic_ring.results.intervals import Interval, mean_interval
from agentic_ring.results.results_file import Figure
from agentic_ring.rollouts.policies import RolloutPlan
from agentic_ring.rollouts.returns import EvaluationRecord, Rollout
from agentic_ring.rollouts.trials import RandomPolicy, TrialPolicy
from agentic_ring.run import ToldRunConfig
from agentic_ring.terminal.progress import progress

QUANTILES = {"data_median": 0.5, "data_p95": 0.95, "data_best": 1.0}
REFERENCES = {"data_p95": "the data's 95th percentile", "data_best": "the best trajectory of the data"}
REQUIRED_GAIN = 0.1
"""The context pays if the lower bound of its normalised gain exceeds this."""
_TRIAL_STRIDE = 1 << 20
"""What seeds of initial states differ by from trial to trial."""


@dataclass(frozen=True)
class ToldReport:
    """Undiscounted returns; E environments."""

    by_context: dict[int, np.ndarray]
    """Number of stored trajectories -> float64 [E], of the first trial."""
    controls: dict[str, np.ndarray]
    """``zeroed``, ``shuffled`` and ``another_task`` -> float64 [E], with these rewards in the largest
    context."""
    own_trials: np.ndarray
    """float64 [E, trials] with nothing stored in context."""
    behind: np.ndarray
    """float64 [E, trials] after the largest context."""
    random_policy: np.ndarray
    """float64 [E]."""
    best_in_context: np.ndarray
    """float64 [E], the best return in the largest context."""
    data: np.ndarray
    """float64 [episodes] of all stored trajectories."""
    cloned: np.ndarray | None
    """float64 [E] of a model trained on this reward alone, if there is one."""
    film: list[Episode]
    """The trials of the first environment after the largest context."""
    reference: Literal["data_p95", "data_best"] = "data_p95"
    """What has 1 in normalised returns."""

    def normalised(self, returns: np.ndarray) -> np.ndarray:
        """Returns scaled so that random actions have 0 and the reference 1."""
        low, high = float(self.random_policy.mean()), float(np.quantile(self.data, QUANTILES[self.reference]))
        return (returns - low) / max(high - low, 1e-9)

    @property
    def gain(self) -> Interval:
        """What the largest context adds to none, normalised and paired by environment."""
        most = max(self.by_context)
        gain = self.normalised(self.by_context[most]) - self.normalised(self.by_context[0])
        return mean_interval(gain, "environments")

    def figures(self) -> list[Figure]:
        """All returns as figures."""
        most = max(self.by_context)
        samples = {f"return/n{count}": returns for count, returns in self.by_context.items()}
        samples |= {f"control/{name}": returns for name, returns in self.controls.items()}
        samples |= {f"own_trials/trial_{i}": each for i, each in enumerate(self.own_trials.T, start=1)}
        samples |= {f"behind_{most}/trial_{i}": each for i, each in enumerate(self.behind.T, start=1)}
        samples |= {"return/random_policy": self.random_policy}
        samples |= {"return/best_in_context": self.best_in_context}
        samples |= {} if self.cloned is None else {"cloned": self.cloned}
        return [
            *(
                Figure.from_interval(name, mean_interval(each, "environments"), "return")
                for name, each in samples.items()
            ),
            *(
                Figure(f"return/{name}", value, "return", n=len(self.data), over="trajectories")
                for name, value in zip(QUANTILES, np.quantile(self.data, [*QUANTILES.values()]), strict=True)
            ),
            Figure.from_interval(
                f"gain/n{most}", self.gain, f"share of the range from random to {self.reference}"
            ),
        ]

    def record(self, algorithms: Sequence[str], action_repeat: int) -> EvaluationRecord:
        """The record of the run, whose trajectories these algorithms collected."""
        rollout = Rollout.of_episodes(self.film, action_repeat)
        return EvaluationRecord(self.data, np.array(algorithms), rollout)

    def verdict(self) -> str:
        """One sentence that says whether the context pays."""
        gain = self.gain
        pays = (gain.value if gain.low is None else gain.low) > REQUIRED_GAIN
        return (
            f"context: {max(self.by_context)} relabelled trajectories add {gain:.2f} of the range between "
            f"random actions and {REFERENCES[self.reference]}; it "
            f"{'pays' if pays else 'is not shown to pay'} (required: a lower bound above {REQUIRED_GAIN:g})"
        )


def evaluate_told(
    config: ToldRunConfig,
    params: Params,
    cloned: Params | None,
    mesh: Mesh,
    data: ToldDecisions,
    reward: RewardOfFeatures,
    others: Sequence[RewardOfFeatures],
) -> ToldReport:
    """Rolls out a model told of ``reward``, its controls, and the policies that it is compared with.

    Args:
      cloned: weights of a model trained on this reward alone, which acts without a context, if there is one.
      mesh: the one it was trained on.
      others: reward functions; that with the lowest correlation with ``reward`` is another task's.

    Raises:
      DataError: there are fewer stored trajectories than the largest context has.
    """
    evaluation, task = config.evaluation, parse_task(config.task)
    most, count, seed = max(evaluation.contexts), evaluation.environments, evaluation.first_seed
    generators = context_generators(seed, count)
    paid = data.rewards(reward)
    stored = draw_contexts(generators, len(paid), most, config.store)
    scales, right = as_told(config.chains, paid[stored])
    returns = data.returns(paid)
    other = data.rewards(_least_alike(paid, data, others))
    shuffled = [
        each.permuted(rewards.ravel()).reshape(rewards.shape)
        for each, rewards in zip(generators, right, strict=True)
    ]
    spoiled = {
        "zeroed": np.zeros_like(right),
        "shuffled": np.stack(shuffled),
        "another_task": as_told(config.chains, other[stored])[1],
    }

    def new_policy(weights: Params) -> ToldPolicy:
        return told_policy(config, weights, mesh, scales, evaluation.trials, seed)

    starts = [task] * count
    with open_environments(
        task.domain, starts, [reward], config.chains.action_repeat, usable_cores()
    ) as environments:

        def roll_out(policy: TrialPolicy, trials: int, label: str) -> tuple[np.ndarray, list[Episode]]:
            return run_recorded(policy, environments, seed + np.arange(count), trials, label)

        def first_trial(policy: TrialPolicy, label: str) -> np.ndarray:
            return roll_out(policy, 1, label)[0][:, 0]

        def tell(context: int, rewards: np.ndarray) -> ToldPolicy:
            first = stored[:, :context]
            shown = data.observation[first], data.action[first], rewards[:, :context]
            policy.start_over(told_prompt(config.chains, *shown))
            return policy

        policy = new_policy(params)
        own, _ = roll_out(policy, evaluation.trials, "nothing stored")
        by_context = {0: own[:, 0]}
        for context in evaluation.contexts[1:-1]:
            by_context[context] = first_trial(tell(context, right), f"{context} trajectories")
        behind, film = roll_out(tell(most, right), evaluation.trials, f"{most} trajectories")
        controls = {name: first_trial(tell(most, each), f"{most}, {name}") for name, each in spoiled.items()}
        alone = None if cloned is None else first_trial(new_policy(cloned), "trained on this reward alone")
        chance = first_trial(RandomPolicy(count, data.action.shape[2], seed), "random policy")
    return ToldReport(
        by_context=by_context | {most: behind[:, 0]},
        controls=controls,
        own_trials=own,
        behind=behind,
        random_policy=chance,
        best_in_context=returns[stored].max(axis=1),
        data=returns,
        cloned=alone,
        film=film,
        # Fewer than one in twenty stored trajectories may meet a goal.
        reference="data_best" if config.chains.goals else "data_p95",
    )


def run_recorded(
    policy: TrialPolicy,
    environments: Environments,
    seeds: np.ndarray,
    trials: int,
    label: str,
    columns: np.ndarray | int = 0,
) -> tuple[np.ndarray, list[Episode]]:
    """Rolls out trials in a row; ``label`` is the text of the progress bar.

    Environment e is rewarded by its reward ``columns[e]``.

    Returns:
      Undiscounted returns float64 [E, trials], and the trials of the first environment.
    """
    returns, film, decisions = [], [], environments.decisions
    with progress(f"rolling out: {label}", trials * decisions) as advance:
        for trial in range(trials):
            observation = environments.reset((seeds + _TRIAL_STRIDE * trial).tolist())
            policy.begin_trial()
            total, mean = np.zeros(len(seeds)), None
            for decision in range(decisions):
                observation, reward = environments.step(np.asarray(policy.act(observation)))
                earned = reward[np.arange(len(seeds)), columns]
                total += earned
                last = decision + 1 == decisions
                policy.receive(earned, last)
                mean = float(total.mean()) if last else mean
                advance(trial * decisions + decision + 1, f"trial {trial + 1}", last_return=mean)
            returns.append(total)
            film.append(environments.episodes()[0])
    return np.stack(returns, axis=1), film


def told_policy(
    config: ToldRunConfig, params: Params, mesh: Mesh, scale: RewardScale, trials: int, seed: int
) -> ToldPolicy:
    """The policy of a run's model with nothing in context; ``scale`` is that of E environments, [E] each.

    Args:
      mesh: the one it was trained on.
      seed: draws the actions.
    """
    count, chains = np.size(scale.mean), config.chains
    return ToldPolicy(
        Model(config.model),
        params,
        RolloutPlan.choose(mesh, count, prompt_tokens=0).mesh,
        config.scaling,
        count,
        trials,
        parse_task(config.task).domain.decisions(chains.action_repeat),
        chains.spans,
        sampling=Sampling(TEMPERATURE, seed=seed),
        reward_scale=scale,
        shown=chains.shown,
    )


def context_generators(seed: int, environments: int) -> list[np.random.Generator]:
    """The random generator of each environment's context."""
    return [np.random.default_rng((seed, environment)) for environment in range(environments)]


def draw_contexts(
    generators: Sequence[np.random.Generator], episodes: int, count: int, store: str
) -> np.ndarray:
    """Draws ``count`` of the episodes of a store for each of E environments: int [E, count].

    Raises:
      DataError: it has fewer for evaluation.
    """
    if episodes < count:
        raise DataError(
            f"for evaluation {store} holds {episodes} trajectories, but the largest context has {count}; "
            "collect more, or use the store that the run was trained on"
        )
    return np.stack([generator.permutation(episodes)[:count] for generator in generators])


def as_told(chains: ToldChainConfig, rewards: np.ndarray) -> tuple[RewardScale, np.ndarray]:
    """How each of E environments is told its rewards [E, n, D], and the rewards so told, float32."""
    scales = [chains.scale(each) for each in rewards]
    told = np.stack([scale(each) for scale, each in zip(scales, rewards, strict=True)])
    return RewardScale(*np.array(scales).T), told


def _least_alike(
    paid: np.ndarray, data: ToldDecisions, others: Sequence[RewardOfFeatures]
) -> RewardOfFeatures:
    """The one of the rewards whose correlation with what is ``paid`` [episodes, D] is lowest."""
    episodes = np.arange(0, len(paid), -(-len(paid) // 32))
    wanted = paid[episodes].ravel()

    def likeness(reward: RewardOfFeatures) -> float:
        values = data.rewards(reward, episodes).ravel()
        return float(np.corrcoef(wanted, values)[0, 1]) if np.ptp(values) and np.ptp(wanted) else np.inf

    return min(others, key=likeness)
