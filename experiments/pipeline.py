"""The stages of a run: configuration, training, evaluation, and what is left on disk."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.chains import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.hindsight import StratifiedSampler
from agentic_ring.data.scaling import measure_scaling
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import Task
from agentic_ring.errors import ConfigError
from agentic_ring.files import replacing
from agentic_ring.mesh import MeshShape
from agentic_ring.progress import say
from agentic_ring.run import EvaluationConfig, RunConfig, differing_fields, load_config, save_config
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import train
from agentic_ring.training.metrics import MetricsLog, read_metrics
from agentic_ring.training.state import Model, TrainState
from evals.dmc_returns import ReturnReport
from evals.intervals import mean_interval
from evals.memory import StepMemory
from evals.plots import plot_data_returns, plot_loss, plot_trial_returns
from evals.results import Figure, Results, write_results
from experiments.presets import Preset


class Stages:
    """Seconds spent in each stage, added up over all sessions of a run once ``keep_in`` names its folder."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._path: Path | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a block, by an error ended too."""
        say(f"== {name}")
        started = time.monotonic()
        try:
            yield
        finally:
            self._add({name: time.monotonic() - started})

    def keep_in(self, directory: Path) -> None:
        """From now on the seconds are kept in ``stages.json``, with those of earlier sessions."""
        self._path = directory / "stages.json"
        self._add(json.loads(self._path.read_text()) if self._path.exists() else {})

    def _add(self, seconds: dict[str, float]) -> None:
        for name, more in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + more
        if self._path is not None:
            with replacing(self._path) as beside:
                beside.write_text(json.dumps(self.seconds, indent=2) + "\n")


def enter_directory(directory: Path, config: RunConfig, resume: bool) -> None:
    """Makes the run's folder ready: goes on with the run that is there, or starts anew.

    Without ``resume`` an earlier run is moved aside, to NAME.1, NAME.2, ...: nothing is deleted.

    Raises:
      ConfigError: the folder holds a run with other settings.
    """
    if (directory / "config.json").exists():
        if resume:
            changed = differing_fields(load_config(directory), config)
            if changed:
                raise ConfigError(
                    f"{directory} holds a run with other settings ({', '.join(changed)}). Give another "
                    "--output, or --no-resume to move that run aside and start anew"
                )
            return
        number = next(n for n in range(1, 10_000) if not Path(f"{directory}.{n}").exists())
        directory.rename(f"{directory}.{number}")
        say(f"the run that was there is now in {directory}.{number}")
    save_config(directory, config)


def resolve(
    preset: Preset,
    preset_name: str,
    task: Task,
    store_path: Path,
    mesh: Mesh,
    loss_extent: Literal["last", "all"],
    seed: int,
) -> RunConfig:
    """The whole configuration of a run: the preset, and what the data decides."""
    with TrajectoryStore.open(store_path) as store:
        held = int(np.gcd.reduce(store.action_repeats))
        action_repeat = math.gcd(held, preset.action_repeat.get(task.domain.name, 1))
        scaling = measure_scaling(store, task.name, action_repeat)
        returns = store.returns(task.name)[store.learnable]
        longest = -(-int(store.lengths.max()) // action_repeat)
    training = preset.training(preset.trajectories * longest, mesh.shape["data"] * mesh.shape["fsdp"], seed)
    evaluation = EvaluationConfig(trials=preset.trials, prompt_trajectories=preset.prompt_trajectories)
    return RunConfig(
        task=task.full_name,
        preset=preset_name,
        store=str(store_path),
        mesh=MeshShape(**mesh.shape),
        chains=ChainConfig(
            task=task.name,
            trajectories=preset.trajectories,
            action_repeat=action_repeat,
            loss_extent=loss_extent,
            seed=seed,
        ),
        scaling=scaling,
        model=preset.model(task.domain, max_timestep=longest),
        training=training,
        evaluation=evaluation,
        target=float(np.quantile(returns, evaluation.target_quantile)),
    )


def train_on_store(
    config: RunConfig, model: Model, mesh: Mesh, directory: Path, wandb_project: str | None
) -> TrainState:
    """Trains the model of ``config``, from its newest checkpoint where there is one."""
    checkpoints = Checkpoints(directory / "checkpoints")
    metrics = MetricsLog(
        directory / "metrics.jsonl", checkpoints.last_step or 0, wandb_project, asdict(config)
    )
    try:
        with TrajectoryStore.open(config.store) as store:
            loader = ChainLoader(store, config.chains, config.scaling, mesh.shape["ring"])
            sampler = StratifiedSampler(
                store.returns(config.chains.task),
                loader.learnable,
                config.chains.trajectories,
                config.chains.top_fraction,
                config.chains.seed,
            )
            batches = ChainPipeline(loader, sampler, config.training.batch_size, mesh)
            return train(config.training, model, batches, mesh, checkpoints, metrics)
    finally:
        metrics.close()
        checkpoints.close()


def all_figures(
    report: ReturnReport, memory: StepMemory, directory: Path, paper_return: float | None
) -> list[Figure]:
    """Every figure of ``results.json``."""
    rows = read_metrics(directory / "metrics.jsonl")
    recent = [row["loss"] for row in rows[-max(1, len(rows) // 10) :]]
    # The first rows of a session hold the compilation.
    speed = np.median([row["tokens_per_second"] for row in rows])
    return [
        *report.figures(paper_return),
        Figure.of("loss/final", mean_interval(recent), "squared error"),
        Figure("tokens_per_second", float(speed), "tokens/s", n=len(rows)),
        Figure("bytes_per_device", float(memory.total), "bytes"),
    ]


def write_report(
    config: RunConfig, report: ReturnReport, figures: list[Figure], stages: Stages, directory: Path
) -> None:
    """Writes ``results.json`` and the plots."""
    results = Results.of_this_process(asdict(config), stages.seconds, figures)
    write_results(directory / "results.json", results)
    plot_loss(directory / "loss.png", config.task, read_metrics(directory / "metrics.jsonl"))
    random_policy = mean_interval(report.random_policy.mean(axis=1))
    plot_trial_returns(
        directory / "trial_returns.png",
        config.task,
        report.trial_intervals(),
        random_policy=random_policy,
        data_median=float(np.median(report.data)),
        data_best=float(report.data.max()),
    )
    with TrajectoryStore.open(config.store) as store:
        plot_data_returns(
            directory / "data_returns.png",
            config.task,
            report.data,
            store.algorithms,
            random_policy=random_policy.value,
            last_trial=float(report.trials[:, -1].mean()),
        )
