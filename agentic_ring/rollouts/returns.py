"""Returns of policies in dm_control: rollouts of all trials, and the figures that are reported of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import Task, parse_task
from agentic_ring.models.model import Model, Params
from agentic_ring.results.intervals import Interval, mean_interval
from agentic_ring.results.results_file import Figure
from agentic_ring.rollouts.environments import shared_environments
from agentic_ring.rollouts.evaluation_record import RecordingPolicy, Rollout
from agentic_ring.rollouts.policies import in_context_policies, without_context
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, TrialPolicy, run_shown_trials
from agentic_ring.run import EvaluationConfig, RunConfig

CONTEXT_MARGIN = 0.05
"""The context pays if the lower bound of its gain exceeds this share of the target."""


@dataclass(frozen=True)
class ReturnReport:
    """Undiscounted returns of the model, and the returns that they are compared with.

    Attributes:
      trials: float64 [E, trials], each with all earlier ones in context.
      no_context: float64 [E, trials] of the same trials, each with an empty context.
      random_policy: float64 [E, trials] of uniform random actions in the same environments.
      data: float64 [episodes] of the training data.
      target: return that every trial was conditioned on.
      rollout: observations, actions, rewards and physics states of the first environment.
    """

    trials: np.ndarray
    no_context: np.ndarray
    random_policy: np.ndarray
    data: np.ndarray
    target: float
    rollout: Rollout

    def figures(self, paper: float | None = None) -> list[Figure]:
        """All returns as figures; ``paper`` is the paper's value of the last and of the best trial."""
        return [
            Figure.from_interval(
                "return/random_policy", mean_interval(self.random_policy.mean(axis=1)), "return"
            ),
            *(
                Figure(
                    f"return/data_{name}", float(np.quantile(self.data, quantile)), "return", n=len(self.data)
                )
                for name, quantile in DATA_QUANTILES.items()
            ),
            Figure("return/target", self.target, "return"),
            *trial_figures(self.trials, paper),
            *(
                Figure.from_interval(f"return/control/no_context/trial_{number}", trial, "return")
                for number, trial in enumerate(trial_intervals(self.no_context), start=1)
            ),
            Figure.from_interval("return/context_gain", self.context_gain, "return"),
        ]

    @property
    def context_gain(self) -> Interval:
        """Return that the context adds to the trials after the first, paired by environment."""
        gain = self.trials - self.no_context
        return mean_interval(gain[:, min(1, gain.shape[1] - 1) :].mean(axis=1))

    def verdict(self) -> str:
        """One sentence that says whether the context pays."""
        gain, margin = self.context_gain, CONTEXT_MARGIN * self.target
        low = gain.value if gain.low is None else gain.low
        spread = "" if gain.low is None else f" ({gain.low:.1f} to {gain.high:.1f})"
        return (
            f"context: trials after the first return {gain.value:.1f}{spread} more with the earlier trials "
            f"in context than without; it {'pays' if low > margin else 'is not shown to pay'} (required: "
            f"more than {margin:.1f}, which is {CONTEXT_MARGIN:.0%} of the target)"
        )


def trial_intervals(returns: np.ndarray) -> list[Interval]:
    """Mean over the environments, with its interval, of each trial of returns [E, trials]."""
    return [mean_interval(trial) for trial in returns.T]


def trial_figures(returns: np.ndarray, paper: float | None = None) -> list[Figure]:
    """Figures of returns [E, trials]: each trial, the last one, and the mean of each environment's best."""
    trials = trial_intervals(returns)
    best = mean_interval(returns.max(axis=1))
    return [
        *(
            Figure.from_interval(f"return/trial_{number}", trial, "return")
            for number, trial in enumerate(trials, start=1)
        ),
        Figure.from_interval("return/last_trial", trials[-1], "return", paper),
        Figure.from_interval("return/best_of_trials", best, "return", paper),
    ]


DATA_QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "best": 1.0}


def evaluate_returns(
    config: RunConfig, model: Model, params: Params, mesh: Mesh, data: np.ndarray | None = None
) -> ReturnReport:
    """Rolls out the model, with and without context, and the random policy, in the same environments.

    ``data`` are the returns of the training trajectories; None reads them from the store.
    """
    task = parse_task(config.task)
    evaluation, action_repeat = config.evaluation, config.chains.action_repeat
    if data is None:
        with TrajectoryStore.open(config.store) as store:
            data = store.returns(task.name)
    random_policy = RandomPolicy(evaluation.environments, task.domain.action_dim, evaluation.first_seed)
    policies = in_context_policies(config, model, params, mesh)
    random_returns, _ = roll_out([random_policy], "random policy", task, action_repeat, evaluation)
    returns, rollout = roll_out(policies, "agentic transformer", task, action_repeat, evaluation)
    control, _ = roll_out(without_context(policies), "same without context", task, action_repeat, evaluation)
    return ReturnReport(returns, control, random_returns, data, config.target, rollout)


def roll_out(
    policies: Sequence[TrialPolicy], name: str, task: Task, action_repeat: int, evaluation: EvaluationConfig
) -> tuple[np.ndarray, Rollout]:
    """Rolls out policies in the environments that every method is evaluated in.

    Args:
      policies: each acts in an equal share of the environments, as a cohort.
      name: label of the progress bar.
      task, action_repeat, evaluation: define the environments and trials.

    Returns:
      Undiscounted returns float64 [E, trials], and the rollout of the first environment.
    """
    decisions = task.domain.decisions(action_repeat)
    environments = shared_environments(
        task, evaluation.first_seed, evaluation.environments, len(policies), action_repeat
    )
    recorded = RecordingPolicy(policies[0], environments[0])
    cohorts = [
        Cohort(policy, each) for policy, each in zip((recorded, *policies[1:]), environments, strict=True)
    ]
    try:
        returns = run_shown_trials(f"rolling out the {name}", cohorts, evaluation.trials, decisions)
    finally:
        for each in environments:
            each.close()
    return returns, recorded.rollout()
