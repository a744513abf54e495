"""The stages of a run in which relabelled trajectories tell the task, and what is left on disk."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax
import rich
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainPipeline
from agentic_ring.data.domains import Domain, Task
from agentic_ring.data.rewards.tasks import RewardOfFeatures, task_reward
from agentic_ring.data.rewards.user_reward import require_variation
from agentic_ring.data.store import TrajectoryStore, data_root, measure_scaling
from agentic_ring.data.told_chains import ToldChainConfig, ToldChains
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.told_rewards import distances_to, draw_training_rewards, left_out
from agentic_ring.distributed import first_process_first
from agentic_ring.files.run_folder import Stages
from agentic_ring.mesh import MeshShape, shape_with_ring
from agentic_ring.models.agentic_transformer import action_loss
from agentic_ring.models.model import Model, Params
from agentic_ring.provenance import usable_cores
from agentic_ring.results.results_file import Figure, Results, figure_table, write_results
from agentic_ring.rollouts.returns import write_record
from agentic_ring.rollouts.told_returns import ToldReport, evaluate_told
from agentic_ring.run import ToldRunConfig, load_told_config
from agentic_ring.terminal.progress import live_table, say
from agentic_ring.training.loop import read_metrics, train
from agentic_ring.training.optimizer import TrainConfig
from data_prep.stores import prepare_store
from evals.compile.step_memory import TrainStep, chain_step, print_memory
from evals.plots import plot_loss
from evals.plots.told_returns import plot_told_returns
from experiments.common.launch import LaunchOptions, print_pipeline, training_outputs
from experiments.exorl.pipeline import decision_steps, training_figures
from experiments.exorl.told_presets import ToldPreset

OWN_COLLECTION = "family"
"""Our collection that covers many behaviours, see ``data_prep.population``."""
CLONE = "cloned"
"""Folder, in that of a run, of the model that is trained on the evaluated task alone."""
_SHORT_CHAIN = 4096
"""Chains of fewer steps do not pay for a ring of simulated devices."""


def run_told(
    task: Task, preset: ToldPreset, launch: LaunchOptions, data: Path | None, collector: str | None
) -> None:
    """Trains on reward functions of the task's domain, and evaluates on the task."""
    mesh = told_mesh(preset, launch)
    if launch.dry_run:
        print_plan(preset, task, mesh, launch)
        return
    directory = launch.output or Path("runs") / f"{task.full_name}-{preset.name}-seed{launch.seed}"
    stages, earlier = Stages(), launch.earlier(directory, load_told_config)
    batch_size = None if earlier is None else earlier.training.batch_size
    with live_table():
        with stages.stage("data"):
            with first_process_first("data"):
                path = prepare_store(task.domain, data or data_root(), collector, OWN_COLLECTION)
            config = resolve(preset, task, path, mesh, launch.seed, batch_size)
        with launch.enter(directory, config, stages):
            with stages.stage("data"), TrajectoryStore.open(path) as store:
                decisions = ToldDecisions.of_store(store, config.scaling, config.chains.action_repeat)
                algorithms = store.algorithms[-config.held_back :]
            seen, told = decisions.split(config.held_back)
            asked = task_reward(task)
            require_variation(task.full_name, seen.rewards(asked))
            drawn = draw_training_rewards(task.domain, seen, config.rewards, config.chains.seed)
            say(f"training on {len(drawn.kept)} reward functions; left out: {left_out(drawn, task.domain)}")
            with stages.stage("training"):
                chains = told_chains(task.domain, seen, drawn.kept, config.chains, mesh)
                params = train_on(chains, config, config.training, mesh, directory, launch.wandb)
            with stages.stage("cloning"):
                chains = told_chains(task.domain, seen, [task], config.clone_chains, mesh)
                cloned = train_on(chains, config, config.clone_training, mesh, directory / CLONE)
            with stages.stage("evaluation"):
                report = evaluate_told(config, params, cloned, mesh, told, asked, drawn.kept)
            with stages.stage("memory"):
                memory = train_step(preset, task, mesh, config.training.batch_size).memory()
            if jax.process_index() != 0:
                return
            figures = [*report.figures(), *training_figures(directory, memory)]
            write_report(config, report, figures, algorithms, stages, directory)
    rich.print(figure_table(figures, f"{task.full_name}, preset {preset.name}, seed {launch.seed}"))
    print(report.verdict())
    print(f"written to {directory}: config.json, metrics.jsonl, results.json, checkpoints and plots")


def told_mesh(preset: ToldPreset, launch: LaunchOptions) -> Mesh:
    """The mesh that the flags ask for; by default a CPU's cores share a batch of short chains."""

    def shape(ring: int | None, devices: int, stages: int) -> MeshShape:
        if launch.leaves_cores and preset.chains.steps < _SHORT_CHAIN:
            cores = min(devices, usable_cores())
            return MeshShape(data=max(n for n in range(1, cores + 1) if preset.batch_size % n == 0), ring=1)
        return shape_with_ring(ring, devices, stages)

    return launch.mesh(preset.name, preset.transformer.layers, shape)


def train_step(preset: ToldPreset, task: Task, mesh: Mesh, batch_size: int | None = None) -> TrainStep:
    """The train step of a preset on this mesh, to compile; ``batch_size`` is that of a run."""
    training = preset.training(mesh, batch_size=batch_size)
    return chain_step(
        preset.model(task.domain), training.optimizer, training.batch_size, preset.length(mesh), mesh
    )


def print_plan(preset: ToldPreset, task: Task, mesh: Mesh, launch: LaunchOptions) -> None:
    """Prints what ``--dry-run`` asks for."""
    chains, step = preset.chains, train_step(preset, task, mesh)
    print(f"parameters          {step.model.parameter_count():,}")
    print(
        f"tokens per sequence {preset.length(mesh):,}: {chains.trajectories} trajectories x {chains.spans} "
        f"known steps, {chains.decisions} decisions, and padding"
    )
    print_pipeline(preset.training(mesh), mesh)
    print_memory(step, launch.absent_machine)


def resolve(
    preset: ToldPreset, task: Task, path: Path, mesh: Mesh, seed: int, batch_size: int | None
) -> ToldRunConfig:
    """The whole configuration of a run: the preset, and what the data decides."""
    with TrajectoryStore.open(path) as store:
        action_repeat = decision_steps(store, preset.action_repeat.get(task.domain.name, 1))
        scaling = measure_scaling(store, task.name, action_repeat)
        noise = preset.noise_for(len(store.algorithms))
    chains, clone = (
        replace(each, action_repeat=action_repeat, seed=seed, noise=noise)
        for each in (preset.chains, preset.cloning)
    )
    return ToldRunConfig(
        task=task.full_name,
        preset=preset.name,
        store=str(path),
        mesh=MeshShape(**mesh.shape),
        chains=chains,
        rewards=preset.rewards,
        scaling=scaling,
        model=preset.model(task.domain),
        training=preset.training(mesh, seed, batch_size),
        clone_chains=clone,
        clone_training=preset.training(mesh, seed, batch_size, preset.cloning_updates),
        evaluation=preset.evaluation(),
        held_back=preset.held_back,
    )


def told_chains(
    domain: Domain,
    data: ToldDecisions,
    asked: Sequence[Task | RewardOfFeatures],
    config: ToldChainConfig,
    mesh: Mesh,
) -> ToldChains:
    """Chains that are told these, and in their ``task_share`` the tasks of the domain."""
    tasks = [Task(domain, name) for name in domain.tasks if config.task_share]
    asked = [*asked, *tasks]
    rewards = [task_reward(each) if isinstance(each, Task) else each for each in asked]
    distances = distances_to(domain, data, asked)
    return ToldChains(data, rewards, config, mesh.shape["ring"], distances=distances, tasks=len(tasks))


def train_on(
    chains: ToldChains,
    config: ToldRunConfig,
    training: TrainConfig,
    mesh: Mesh,
    directory: Path,
    wandb_project: str | None = None,
) -> Params:
    """Trains the model on chains, from its newest checkpoint if there is one; see ``training.loop``."""
    with training_outputs(directory, config, wandb_project) as outputs:
        batches = ChainPipeline(chains, chains.plan, training.batch_size, mesh, seed=training.seed)
        return train(training, Model(config.model), action_loss, batches, mesh, *outputs).params


def write_report(
    config: ToldRunConfig,
    report: ToldReport,
    figures: list[Figure],
    algorithms: Sequence[str],
    stages: Stages,
    directory: Path,
) -> None:
    """Writes ``results.json``, ``evaluation.npz`` and the plots."""
    results = Results.of_this_process(asdict(config), stages.seconds, figures)
    write_results(directory / "results.json", results)
    write_record(directory, report.record(algorithms, config.chains.action_repeat))
    plot_loss(directory / "loss.png", config.task, read_metrics(directory / "metrics.jsonl"))
    plot_told_returns(directory / "returns.png", config.task, report)
