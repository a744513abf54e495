"""The main job: a ring-attention Agentic Transformer on ExoRL trajectories (Table 5).

    python experiments/exorl_at_ring.py --task walker_run

finds ExoRL data or collects its own and trains with ring attention, in one of two ways:

    --conditioning context   on many reward functions of the domain, and on no task unless --task-share is
                             given; 128 trajectories, relabelled for the task, then tell the model what to do
    --conditioning return    on hindsight chains of the task, as in the paper; the target return stands in
                             every step, and the model is rolled out trial after trial

Figures and plots go to runs/NAME/. Run the same command again after an interruption: every stage continues
where it stopped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import jax
import rich
import tyro
from jax.sharding import Mesh

from agentic_ring.attention import padded_length
from agentic_ring.data.domains import Task, all_tasks, parse_task
from agentic_ring.data.store import data_root
from agentic_ring.distributed import first_process_first
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Stages
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP
from agentic_ring.models.model import Model
from agentic_ring.results.results_file import figure_table
from agentic_ring.rollouts.returns import evaluate_returns
from agentic_ring.run import load_config
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import live_table
from data_prep.stores import prepare_store
from evals.compile.machines import NamedMachine
from evals.compile.step_memory import TrainStep, chain_step, print_memory
from experiments import paper
from experiments.common.launch import LaunchOptions, default_preset, print_pipeline
from experiments.exorl.pipeline import check_start, resolve, train_on_store, training_figures, write_report
from experiments.exorl.presets import PRESETS, Preset
from experiments.exorl.told_pipeline import run_told
from experiments.exorl.told_presets import told_preset


def train_step(
    preset: Preset, task: Task, action_repeat: int, mesh: Mesh, batch_size: int | None = None
) -> TrainStep:
    """The train step of a preset for a task on this mesh, to compile; see ``Preset.training``."""
    decisions = task.domain.decisions(action_repeat)
    training = preset.training(decisions, mesh, batch_size=batch_size)
    model = preset.model(task.domain, max_timestep=decisions)
    steps = padded_length(preset.trajectories * decisions, mesh.shape["ring"], "zigzag")
    return chain_step(model, training.optimizer, training.batch_size, steps, mesh)


def print_plan(
    preset: Preset, task: Task, mesh: Mesh, start: Path | None, absent: NamedMachine | None
) -> None:
    """Prints what ``--dry-run`` asks for; ``absent`` is the machine of the mesh if it is not this one."""
    action_repeat = preset.action_repeat.get(task.domain.name, 1)
    decisions = task.domain.decisions(action_repeat)
    step = train_step(preset, task, action_repeat, mesh)
    if start is not None:
        check_start(start, step.model.config)
    print(f"parameters          {step.model.parameter_count():,}")
    print(
        f"tokens per sequence {preset.trajectories * decisions * TOKENS_PER_STEP:,} = {preset.trajectories} "
        f"trajectories x {decisions} steps x {TOKENS_PER_STEP} tokens"
    )
    print_pipeline(preset.training(decisions, mesh), mesh)
    print_memory(step, absent)


def main(
    task: Annotated[
        Literal[all_tasks()],  # pyright: ignore[reportInvalidTypeForm]
        tyro.conf.arg(metavar="DOMAIN_TASK"),
    ],
    launch: Annotated[LaunchOptions, tyro.conf.arg(name="")],
    conditioning: Literal["context", "return"] = "context",
    preset: Annotated[
        Literal["demo", "small", "paper"] | None, cli.optional_flag(metavar="{demo,small,paper}")
    ] = None,
    num_trajectories: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    action_repeat: Annotated[int | None, cli.optional_flag(metavar="STEPS")] = None,
    updates: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    dropout: float = 0.0,
    start: Annotated[Path | None, cli.optional_flag(metavar="RUN")] = None,
    loss_extent: Literal["leaders", "all"] = "leaders",
    task_share: float = 0.0,
    data: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    collector: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
) -> None:
    """Trains the Agentic Transformer on trajectories and rolls it out on a task.

    Args:
      task: Task on which the model is evaluated, such as walker_run.
      launch: Flags that the training scripts share.
      conditioning: What tells the model what to do: stored trajectories, relabelled for the task, or a target
        return, in a model of this task alone.
      preset: Size of the run: demo (a laptop), small (one accelerator) or paper (350M parameters,
        512K tokens). Default: demo on a CPU, small on anything else.
      num_trajectories: Number of trajectories per chain; more of them make the context longer. Default:
        the preset's.
      action_repeat: Number of control steps per decision. It is lowered, with a message, where the actions
        of the data are not held for a multiple of it. With 1 a trajectory is as long as the paper's, 4,000
        tokens. Default: the preset's.
      updates: Number of optimiser updates; the learning-rate schedule spans all of them. Default: the
        preset's.
      dropout: Share of the entries of each residual branch that is dropped in training.
      start: With --conditioning return, folder of a finished run, or a policy, whose weights training begins
        with, such as one of shorter chains. The learning rate begins where it ends in other runs, at a tenth
        of theirs. Default: weights drawn from the seed.
      loss_extent: With --conditioning return, trajectories of a chain that bear loss: the best ones at its
        end, or all whose actions a policy chose.
      task_share: With --conditioning context, share of the chains that are told a task of the domain, this
        one among them. With 0 the model never trains on a task: it is told one when it is evaluated.
      data: Folder of the data. Default: $AGENTIC_RING_DATA, or else data.
      collector: ExoRL collector whose data is read, such as rnd. Default: the one found in the data folder;
        if there is none, the script collects data of its own.
    """
    launch.ready_devices()
    name, parsed = preset or default_preset(), parse_task(task)
    if conditioning == "context":
        if start is not None or loss_extent != "leaders":
            raise ConfigError("--start and --loss-extent belong to --conditioning return; leave them out")
        told = replace(told_preset(name, parsed.domain), dropout=dropout)
        if num_trajectories is not None:
            told = told.with_trajectories(num_trajectories)
        if action_repeat is not None:
            told = replace(told, action_repeat=told.action_repeat | {parsed.domain.name: action_repeat})
        if updates is not None:
            told = replace(told, updates=updates)
        told = replace(told, chains=replace(told.chains, task_share=task_share))
        run_told(parsed, told.for_domain(parsed.domain), launch, data, collector)
        return
    if task_share:
        raise ConfigError("--task-share belongs to --conditioning context; leave it out")
    chosen = replace(PRESETS[name].for_domain(parsed.domain), dropout=dropout)
    if num_trajectories is not None:
        chosen = chosen.with_trajectories(num_trajectories)
    if action_repeat is not None:
        repeats = chosen.action_repeat | {parsed.domain.name: action_repeat}
        chosen = replace(chosen, action_repeat=repeats)
    if updates is not None:
        chosen = replace(chosen, updates=updates)
    if start is not None:  # at the rates where training ended
        chosen = replace(chosen, optimizer=chosen.optimizer.scaled(chosen.optimizer.final_fraction))
    mesh = launch.mesh(name, chosen.transformer.layers)
    if launch.dry_run:
        print_plan(chosen, parsed, mesh, start, launch.absent_machine)
        return

    directory = launch.output or Path("runs") / f"{task}-{name}-seed{launch.seed}"
    stages = Stages()
    earlier = launch.earlier(directory, load_config)
    batch_size = None if earlier is None else earlier.training.batch_size
    with live_table():
        with stages.stage("data"):
            with first_process_first("data"):
                store = prepare_store(parsed.domain, data or data_root(), collector)
            config = resolve(chosen, parsed, store, mesh, loss_extent, launch.seed, batch_size, start)
            if start is not None and earlier is None:
                check_start(start, config.model)
        with launch.enter(directory, config, stages):
            model = Model(config.model)
            with stages.stage("training"):
                state = train_on_store(config, model, mesh, directory, launch.wandb)
            with stages.stage("evaluation"):
                report = evaluate_returns(config, model, state.params, mesh)
            with stages.stage("memory"):
                repeat, rows = config.chains.action_repeat, config.training.batch_size
                memory = train_step(chosen, parsed, repeat, mesh, rows).memory()
            figures = [*report.figures(paper.exorl_return(task)), *training_figures(directory, memory)]
            if jax.process_index() != 0:
                return
            write_report(config, report, figures, stages, directory)
    rich.print(figure_table(figures, f"{task}, preset {name}, seed {launch.seed}"))
    print(report.verdict())
    print(paper.RETURN_CAVEAT)
    print(f"written to {directory}: config.json, metrics.jsonl, results.json, checkpoints and plots")


if __name__ == "__main__":
    cli.run(main)
