"""Returns of a trained Agentic Transformer in dm_control: trials one after another, all in context.

    python evals/dmc_returns.py --run runs/walker_run-demo-seed0

rolls a run's last checkpoint out again, for instance in other environments (``--first-seed``), and
prints the returns of every trial.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import rich
from jax.sharding import Mesh

from agentic_ring import cli
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import Task, parse_task
from agentic_ring.errors import CheckpointError
from agentic_ring.mesh import mesh_of_saved, simulate_cpu_devices
from agentic_ring.models.model import Model, Params
from agentic_ring.progress import progress
from agentic_ring.run import EvaluationConfig, RunConfig, load_config
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import abstract_state
from evals.common.intervals import Interval, mean_interval
from evals.common.results import Figure, figure_table
from evals.rollouts.environments import shared_environments
from evals.rollouts.evaluation_record import RecordingPolicy, Rollout
from evals.rollouts.policies import in_context_policies
from evals.rollouts.trials import Cohort, RandomPolicy, TrialPolicy, run_trials


@dataclass(frozen=True)
class ReturnReport:
    """Undiscounted returns, and what they are to be judged by.

    Attributes:
      trials: float64 [E, trials].
      random_policy: float64 [E, trials], uniform random actions in the same environments.
      data: float64 [episodes], the training data.
      target: return that every trial aimed at.
      rollout: what the first environment went through.
    """

    trials: np.ndarray
    random_policy: np.ndarray
    data: np.ndarray
    target: float
    rollout: Rollout

    def trial_intervals(self) -> list[Interval]:
        """Mean of each trial over the environments, with its interval."""
        return trial_intervals(self.trials)

    def figures(self, paper: float | None = None) -> list[Figure]:
        """All of it as figures; ``paper`` stands beside the last trial and the best one."""
        return [
            Figure.of("return/random_policy", mean_interval(self.random_policy.mean(axis=1)), "return"),
            *(
                Figure(
                    f"return/data_{name}", float(np.quantile(self.data, quantile)), "return", n=len(self.data)
                )
                for name, quantile in DATA_QUANTILES.items()
            ),
            Figure("return/target", self.target, "return"),
            *trial_figures(self.trials, paper),
        ]


def trial_intervals(returns: np.ndarray) -> list[Interval]:
    """Mean of each trial over the environments, of returns [E, trials]."""
    return [mean_interval(trial) for trial in returns.T]


def trial_figures(returns: np.ndarray, paper: float | None = None) -> list[Figure]:
    """Each trial of returns [E, trials], the last, and the mean over environments of their best trial."""
    trials = trial_intervals(returns)
    best = mean_interval(returns.max(axis=1))
    return [
        *(
            Figure.of(f"return/trial_{number}", trial, "return")
            for number, trial in enumerate(trials, start=1)
        ),
        Figure.of("return/last_trial", trials[-1], "return", paper),
        Figure.of("return/best_of_trials", best, "return", paper),
    ]


DATA_QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "best": 1.0}


def evaluate_returns(config: RunConfig, model: Model, params: Params, mesh: Mesh) -> ReturnReport:
    """Rolls out the model and, in the same environments, the random policy."""
    task = parse_task(config.task)
    evaluation, action_repeat = config.evaluation, config.chains.action_repeat
    with TrajectoryStore.open(config.store) as store:
        data = store.returns(task.name)
    random_policy = RandomPolicy(evaluation.environments, task.domain.action_dim, evaluation.first_seed)
    policies = in_context_policies(config, model, params, mesh)
    by_chance, _ = roll_out([random_policy], "random policy", task, action_repeat, evaluation)
    returns, rollout = roll_out(policies, "agentic transformer", task, action_repeat, evaluation)
    return ReturnReport(returns, by_chance, data, config.target, rollout)


def roll_out(
    policies: Sequence[TrialPolicy], name: str, task: Task, action_repeat: int, evaluation: EvaluationConfig
) -> tuple[np.ndarray, Rollout]:
    """Undiscounted returns float64 [E, trials], in the environments that every method meets.

    Beside them what the first environment went through.

    Args:
      policies: that share the environments evenly, each with a cohort of its own.
      name: of the policy, for the progress bar.
      task, action_repeat, evaluation: of the environments and trials.
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
        with progress(f"rolling out the {name}", evaluation.trials * decisions) as advance:

            def on_step(trial: int, step: int) -> None:
                advance(trial * decisions + step + 1, f"trial {trial + 1}")

            returns = run_trials(cohorts, evaluation.trials, on_step)
    finally:
        for each in environments:
            each.close()
    return returns, recorded.rollout()


@contextmanager
def _opened(run: Path, checkpoint: Literal["last", "best"]) -> Iterator[tuple[Checkpoints, int]]:
    """A run's checkpoints, and the step of the one that is asked for."""
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(f"{run} has no checkpoint; train it first")
    checkpoints = Checkpoints(run / "checkpoints")
    try:
        step = checkpoints.last_step if checkpoint == "last" else checkpoints.best_step
        if step is None:
            raise CheckpointError(f"{run} has no checkpoint; train it first")
        yield checkpoints, step
    finally:
        checkpoints.close()


def checkpoint_step(run: Path, checkpoint: Literal["last", "best"]) -> int:
    """The step of a run's checkpoint.

    Raises:
      CheckpointError: there is none.
    """
    with _opened(run, checkpoint) as (_, step):
        return step


def load_params(
    run: Path, config: RunConfig, mesh: Mesh, checkpoint: Literal["last", "best"] = "last"
) -> tuple[Params, int]:
    """The parameters of a run's checkpoint, on ``mesh``, and the checkpoint's step.

    Raises:
      CheckpointError: there is none, or it does not fit the configuration.
    """
    optimizer = make_optimizer(config.training.optimizer, config.training.steps)
    with _opened(run, checkpoint) as (checkpoints, step), jax.set_mesh(mesh):
        like = abstract_state(Model(config.model), optimizer, mesh, config.model.transformer.rules)
        state, _ = checkpoints.restore(step, like)
    return state.params, step


def main(
    run: Path,
    environments: int | None = None,
    first_seed: int | None = None,
    checkpoint: Literal["last", "best"] = "last",
) -> None:
    """Rolls a trained run out again and prints the returns of every trial.

    Args:
      run: Folder of the run, such as runs/walker_run-demo-seed0.
      environments: Environments at once; as in the run if left out.
      first_seed: Seed of the first environment; as in the run if left out.
      checkpoint: The newest one, or the one with the lowest training loss.
    """
    config = load_config(run)
    changes = {"environments": environments, "first_seed": first_seed}
    given = {name: value for name, value in changes.items() if value is not None}
    config = replace(config, evaluation=replace(config.evaluation, **given))
    simulate_cpu_devices(8)
    mesh = mesh_of_saved(config.mesh)
    params, step = load_params(run, config, mesh, checkpoint)
    report = evaluate_returns(config, Model(config.model), params, mesh)
    rich.print(figure_table(report.figures(), f"{config.task}, checkpoint {step}"))


if __name__ == "__main__":
    cli.run(main)
