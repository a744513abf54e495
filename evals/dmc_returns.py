"""Returns of a trained Agentic Transformer in dm_control: trials one after another, all in context.

    python evals/dmc_returns.py --run runs/walker_run-demo

rolls a run's last checkpoint out again, for instance in other environments (``--first-seed``), and
prints the returns of every trial.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import rich
from jax.sharding import Mesh

from agentic_ring import cli
from agentic_ring.data.chains import ChainLoader
from agentic_ring.data.hindsight import StratifiedSampler
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import Task, parse_task
from agentic_ring.errors import CheckpointError
from agentic_ring.inference import InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.progress import progress
from agentic_ring.provenance import usable_cores
from agentic_ring.run import EvaluationConfig, RunConfig, load_config
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.state import Model, Params, abstract_state, make_optimizer
from evals.environments import make_environments
from evals.evaluation_record import RecordingPolicy, Rollout
from evals.intervals import Interval, mean_interval
from evals.results import Figure, figure_table
from evals.trials import RandomPolicy, TrialPolicy, run_trials


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
            Figure("return/target", self.target, "return", n=len(self.data)),
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
    policy = in_context_policy(config, model, params, mesh)
    by_chance, _ = roll_out(random_policy, "random policy", task, action_repeat, evaluation)
    returns, rollout = roll_out(policy, "agentic transformer", task, action_repeat, evaluation)
    return ReturnReport(returns, by_chance, data, config.target, rollout)


def in_context_policy(
    config: RunConfig, model: Model, params: Params, mesh: Mesh, prompt_chunk: int | None = None
) -> InContextPolicy:
    """The policy of a trained Agentic Transformer, with its prompt read.

    Args:
      config: of the run.
      model, params: of its checkpoint.
      mesh: that it was trained on; the policy may live on fewer devices (``rollout_mesh``).
      prompt_chunk: steps of the prompt read at a time; see ``InContextPolicy``.
    """
    evaluation = config.evaluation
    mesh = rollout_mesh(mesh, evaluation)
    prompt = None
    if evaluation.prompt_trajectories:
        with TrajectoryStore.open(config.store) as store:
            prompt = read_prompt(store, config, mesh.shape["ring"])
    decisions = -(-parse_task(config.task).domain.episode_steps // config.chains.action_repeat)
    return InContextPolicy(
        model,
        params,
        mesh,
        config.scaling,
        config.target,
        evaluation.environments,
        decisions * evaluation.trials,
        prompt,
        prompt_chunk,
    )


def rollout_mesh(mesh: Mesh, evaluation: EvaluationConfig) -> Mesh:
    """Where a policy is rolled out: on ``mesh``, or where a CPU simulates it on one device a core.

    More devices than cores take turns, and wait for each other twice a layer. A prompt's cache is sharded
    over the cores; environments without one are shared out over them, as far as they divide.
    """
    if jax.process_count() > 1 or mesh.devices.flat[0].platform != "cpu":
        return mesh
    devices = list(mesh.devices.flat)[: usable_cores()]
    if evaluation.prompt_trajectories:
        return make_mesh(MeshShape(ring=len(devices)), devices)
    copies = math.gcd(len(devices), evaluation.environments)
    return make_mesh(MeshShape(data=copies, ring=1), devices[:copies])


def roll_out(
    policy: TrialPolicy, name: str, task: Task, action_repeat: int, evaluation: EvaluationConfig
) -> tuple[np.ndarray, Rollout]:
    """Undiscounted returns float64 [E, trials] of a policy, in the environments that every policy meets.

    Beside them what the first environment went through.

    Args:
      name: of the policy, for the progress bar.
    """
    seeds = range(evaluation.first_seed, evaluation.first_seed + evaluation.environments)
    decisions = -(-task.domain.episode_steps // action_repeat)
    environments = make_environments(task, list(seeds), action_repeat)
    recorded = RecordingPolicy(policy, environments)
    try:
        with progress(f"rolling out the {name}", evaluation.trials * decisions) as advance:

            def on_step(trial: int, step: int) -> None:
                advance(trial * decisions + step + 1, f"trial {trial + 1}")

            returns = run_trials(recorded, environments, evaluation.trials, on_step)
    finally:
        environments.close()
    return returns, recorded.rollout()


def read_prompt(store: TrajectoryStore, config: RunConfig, ring: int) -> ChainSteps:
    """Stored trajectories below the target, in ascending return and told to aim at it: [1, S] steps.

    S is a multiple of ``ring``.
    """
    count = config.evaluation.prompt_trajectories
    loader = ChainLoader(
        store, replace(config.chains, trajectories=count, layout="contiguous"), config.scaling, ring=ring
    )
    returns = store.returns(config.chains.task)
    below = np.flatnonzero(returns <= config.target)
    sampler = StratifiedSampler(
        returns[below],
        loader.learnable[below],
        count,
        config.chains.top_fraction,
        config.evaluation.first_seed,
    )
    plan = sampler(0)
    plan = replace(plan, episodes=tuple(int(below[e]) for e in plan.episodes), target=config.target)
    fields = loader.load(plan, slice(0, loader.length))
    steps: dict[str, Any] = {name: array[None] for name, array in fields.items() if name != "weight"}
    return ChainSteps(**steps)


def load_params(
    run: Path, config: RunConfig, mesh: Mesh, checkpoint: Literal["last", "best"] = "last"
) -> tuple[Params, int]:
    """The parameters of a run's checkpoint, on ``mesh``, and the checkpoint's step.

    Raises:
      CheckpointError: there is none, or it does not fit the configuration.
    """
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(f"{run} has no checkpoint; train it first")
    checkpoints = Checkpoints(run / "checkpoints")
    try:
        step = checkpoints.last_step if checkpoint == "last" else checkpoints.best_step
        if step is None:
            raise CheckpointError(f"{run} has no checkpoint; train it first")
        optimizer = make_optimizer(config.training.optimizer, config.training.steps)
        with jax.set_mesh(mesh):
            like = abstract_state(Model(config.model), optimizer, mesh, config.model.transformer.rules)
            state, _ = checkpoints.restore(step, like)
    finally:
        checkpoints.close()
    return state.params, step


def main(
    run: Path,
    environments: int | None = None,
    first_seed: int | None = None,
    checkpoint: Literal["last", "best"] = "last",
) -> None:
    """Rolls a trained run out again and prints the returns of every trial.

    Args:
      run: Folder of the run, such as runs/walker_run-demo.
      environments: Environments at once; as in the run if left out.
      first_seed: Seed of the first environment; as in the run if left out.
      checkpoint: The newest one, or the one with the lowest training loss.
    """
    config = load_config(run)
    changes = {"environments": environments, "first_seed": first_seed}
    given = {name: value for name, value in changes.items() if value is not None}
    config = replace(config, evaluation=replace(config.evaluation, **given))
    simulate_cpu_devices(8)
    mesh = make_mesh(config.mesh)
    params, step = load_params(run, config, mesh, checkpoint)
    report = evaluate_returns(config, Model(config.model), params, mesh)
    rich.print(figure_table(report.figures(), f"{config.task}, checkpoint {step}"))


if __name__ == "__main__":
    cli.run(main)
