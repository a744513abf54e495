"""The stages of a run: configuration, training, evaluation, and what is left on disk."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.domains import Task
from agentic_ring.data.hindsight_chains import StratifiedSampler
from agentic_ring.data.store import Scaling, TrajectoryStore, measure_scaling, target_return
from agentic_ring.device_memory import PlannedMemory
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Stages, differing_fields
from agentic_ring.mesh import MeshShape
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig, action_loss
from agentic_ring.models.model import Model, Params
from agentic_ring.policies.policy import checkpoint_step, is_policy, load_params, policy_folder
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.rollouts.returns import EvaluationRecord, ReturnReport, trial_intervals, write_record
from agentic_ring.run import EvaluationConfig, RunConfig, load_config
from agentic_ring.terminal.progress import say
from agentic_ring.training.loop import Measure, read_metrics, train
from agentic_ring.training.train_step import TrainState
from evals.plots import plot_data_returns, plot_loss, plot_trial_returns
from experiments.common.launch import training_outputs
from experiments.exorl.presets import Preset


@dataclass(frozen=True)
class DataFacts:
    """The part of a run's configuration that its data decides."""

    action_repeat: int
    """Control steps per decision."""
    scaling: Scaling
    longest: int
    """Number of decisions of the longest trajectory."""
    target: float
    """Return that every trial aims at, see ``target_return``."""


def decision_steps(store: TrajectoryStore, wanted: int) -> int:
    """Control steps per decision: those that are wanted, or fewer, with a message, where actions change."""
    action_repeat = math.gcd(store.held_steps, wanted)
    if action_repeat != wanted:
        say(
            f"decisions last {action_repeat} control steps, not {wanted}: an action in {store.path.name} "
            f"is held for {store.held_steps}"
        )
    return action_repeat


def measure_data(preset: Preset, task: Task, store_path: Path, target_quantile: float) -> DataFacts:
    """Reads a store once; decisions last as long as in the preset, or less where stored actions change."""
    with TrajectoryStore.open(store_path) as store:
        action_repeat = decision_steps(store, preset.action_repeat.get(task.domain.name, 1))
        longest = -(-int(store.lengths.max()) // action_repeat)
        target = target_return(store, task.name, target_quantile)
        return DataFacts(action_repeat, measure_scaling(store, task.name, action_repeat), longest, target)


def resolve(
    preset: Preset,
    task: Task,
    store_path: Path,
    mesh: Mesh,
    loss_extent: Literal["leaders", "all"],
    seed: int,
    batch_size: int | None = None,
    start: Path | None = None,
) -> RunConfig:
    """The whole configuration of a run: the preset, and what the data decides; see ``Preset.training``."""
    evaluation = EvaluationConfig(trials=preset.trials, prompt_trajectories=preset.prompt_trajectories)
    data = measure_data(preset, task, store_path, evaluation.target_quantile)
    count, repeat = preset.trajectories, data.action_repeat
    return RunConfig(
        task=task.full_name,
        preset=preset.name,
        store=str(store_path),
        mesh=MeshShape(**mesh.shape),
        chains=ChainConfig(task.name, count, repeat, loss_extent=loss_extent, seed=seed),
        scaling=data.scaling,
        model=preset.model(task.domain, max_timestep=data.longest),
        training=preset.training(data.longest, mesh, seed, batch_size),
        evaluation=evaluation,
        target=data.target,
        start=None if start is None else str(start),
    )


def check_start(start: Path, model: AgenticTransformerConfig) -> None:
    """Checks that a run or policy, given as in ``policy_folder``, has the final weights of this model."""
    folder = policy_folder(start)
    earlier = load_config(folder)
    if changed := differing_fields(earlier.model, model):
        values = (f"{name} is {there} there, {here} here" for name, (there, here) in changed.items())
        raise ConfigError(
            f"the weights of {start} do not fit this run's model: {'; '.join(values)}. Start from a run with "
            "the same preset, domain and action repeat"
        )
    if not is_policy(folder) and checkpoint_step(folder, "last") < earlier.training.steps:
        raise ConfigError(f"{start} is not trained to its end; run its command again, and start then")


def train_on_store(
    config: RunConfig,
    model: Model,
    mesh: Mesh,
    directory: Path,
    wandb_project: str | None = None,
    measure: Measure | None = None,
) -> TrainState:
    """Trains the model of ``config``, from its newest checkpoint if there is one; see ``training.loop``."""
    chains, training = config.chains, config.training

    def start() -> Params:
        folder = policy_folder(str(config.start))
        return load_params(folder, load_config(folder), mesh)[0]

    with (
        training_outputs(directory, config, wandb_project) as outputs,
        TrajectoryStore.open(config.store) as store,
    ):
        loader = ChainLoader(store, chains, config.scaling, mesh.shape["ring"])
        returns = store.returns(chains.task)
        sampler = StratifiedSampler(
            returns, store.learnable, chains.trajectories, chains.top_fraction, chains.seed
        )
        return train(
            training,
            model,
            action_loss,
            ChainPipeline(loader, sampler, training.batch_size, mesh, seed=training.seed),
            mesh,
            *outputs,
            tokens_per_place=TOKENS_PER_STEP,
            start=None if config.start is None else start,
            measure=measure,
        )


def training_figures(directory: Path, memory: PlannedMemory) -> list[Figure]:
    """The figures of ``results.json`` that tell how training went."""
    rows = read_metrics(directory / "metrics.jsonl")
    recent = [row["loss"] for row in rows[-max(1, len(rows) // 10) :]]
    speed = np.median([row["tokens_per_second"] for row in rows])  # the first rows hold the compilation
    return [
        Figure.from_interval("loss/final", mean_interval(recent, "updates"), "squared error"),
        Figure("tokens_per_second", float(speed), "tokens/s", n=len(rows), over="updates"),
        Figure("bytes_per_device", float(memory.total), "bytes"),
    ]


def write_report(
    config: RunConfig, report: ReturnReport, figures: list[Figure], stages: Stages, directory: Path
) -> None:
    """Writes ``results.json``, ``evaluation.npz`` and the plots."""
    results = Results.of_this_process(asdict(config), stages.seconds, figures)
    write_results(directory / "results.json", results)
    with TrajectoryStore.open(config.store) as store:
        algorithms = store.algorithms
    write_record(directory, EvaluationRecord(report.data, np.array(algorithms), report.rollout))
    plot_loss(directory / "loss.png", config.task, read_metrics(directory / "metrics.jsonl"))
    random_policy = mean_interval(report.random_policy.mean(axis=1), "environments")
    plot_trial_returns(
        directory / "trial_returns.png",
        config.task,
        trial_intervals(report.trials),
        no_context=trial_intervals(report.no_context),
        random_policy=random_policy,
        data_median=float(np.median(report.data)),
        data_best=float(report.data.max()),
    )
    plot_data_returns(
        directory / "data_returns.png",
        config.task,
        report.data,
        algorithms,
        random_policy=random_policy.value,
        last_trial=float(report.trials[:, -1].mean()),
    )
