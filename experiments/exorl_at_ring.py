"""The main job: a ring-attention Agentic Transformer on ExoRL trajectories (Table 5).

    python experiments/exorl_at_ring.py --task walker_run

finds ExoRL data or collects its own, relabels it for the task, trains on hindsight chains with ring
attention over all devices, rolls the model out trial after trial, and writes figures and plots to
runs/NAME/. Run the same command again after an interruption: every stage goes on where it stopped.
"""

from pathlib import Path
from typing import Annotated, Literal

import jax
import rich
import tyro
from jax.sharding import Mesh

from agentic_ring import cli
from agentic_ring.attention import padded_length
from agentic_ring.data.tasks import Task, all_tasks, parse_task
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import make_mesh, shape_with_ring, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP
from agentic_ring.models.model import Model
from agentic_ring.processes import first_process_first, join_processes
from agentic_ring.progress import say
from agentic_ring.run_folder import Stages, enter_directory
from data_prep.folders import data_root
from evals.common.results import figure_table
from evals.compile.machines import MACHINES, NamedMachine, machine
from evals.compile.step_memory import TrainStep, chain_step, print_memory
from evals.dmc_returns import evaluate_returns
from experiments import paper
from experiments.exorl.pipeline import all_figures, resolve, train_on_store, write_report
from experiments.exorl.presets import PRESETS, Preset
from experiments.exorl.stores import prepare_store

SIMULATED_DEVICES = 8


def train_step(preset: Preset, task: Task, action_repeat: int, mesh: Mesh) -> TrainStep:
    """The train step of a preset for a task on this mesh, to compile."""
    decisions = task.domain.decisions(action_repeat)
    steps = padded_length(preset.trajectories * decisions, mesh.shape["ring"], "zigzag")
    training = preset.training(preset.trajectories * decisions, mesh.shape["data"] * mesh.shape["fsdp"])
    model = preset.model(task.domain, max_timestep=decisions)
    return chain_step(model, training.optimizer, training.batch_size, steps, mesh)


def print_plan(preset: Preset, task: Task, mesh: Mesh, absent: NamedMachine | None) -> None:
    """What ``--dry-run`` shows; the mesh is of an absent machine's devices, or of those that are here."""
    action_repeat = preset.action_repeat.get(task.domain.name, 1)
    decisions = task.domain.decisions(action_repeat)
    step = train_step(preset, task, action_repeat, mesh)
    print(f"parameters          {step.model.parameter_count():,}")
    print(
        f"tokens a sequence   {preset.trajectories * decisions * TOKENS_PER_STEP:,} = {preset.trajectories} "
        f"trajectories x {decisions} steps x {TOKENS_PER_STEP} tokens"
    )
    print_memory(step, absent)


def main(
    task: Annotated[
        Literal[all_tasks()],  # pyright: ignore[reportInvalidTypeForm]
        tyro.conf.arg(metavar="DOMAIN_TASK"),
    ],
    preset: Annotated[
        Literal["demo", "small", "paper"] | None, cli.optional_flag(metavar="{demo,small,paper}")
    ] = None,
    num_trajectories: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    action_repeat: Annotated[int | None, cli.optional_flag(metavar="STEPS")] = None,
    updates: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    ring: Annotated[int | None, cli.optional_flag(metavar="DEVICES")] = None,
    loss_extent: Literal["last", "all"] = "last",
    seed: int = 0,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    data: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    collector: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    dry_run: Annotated[bool, cli.switch] = False,
    hardware: Annotated[
        Literal[tuple(MACHINES)] | None,  # pyright: ignore[reportInvalidTypeForm]
        cli.optional_flag(metavar="NAME"),
    ] = None,
    wandb: Annotated[str | None, cli.optional_flag(metavar="PROJECT")] = None,
    distributed: Annotated[bool, cli.switch] = False,
) -> None:
    """Trains the Agentic Transformer on trajectories of a task and rolls it out.

    Args:
      task: What the trajectories are relabelled for and the model is evaluated on, such as walker_run.
      preset: Size of the run: demo (a laptop), small (one accelerator) or paper (350M parameters,
        512K tokens). Default: demo on a CPU, small on anything else.
      num_trajectories: Trajectories of a chain; more of them make the context longer. Default: the
        preset's.
      action_repeat: Control steps that a decision lasts; fewer, and it says so, where the data's actions
        are not held for a multiple of them. With 1 a trajectory is as long as the paper's, 4,000 tokens.
        Default: the preset's.
      updates: Of the optimiser, over which the learning rate falls. Default: the preset's.
      ring: Devices the sequence is sharded over; the rest share the batch out. Default: all.
      loss_extent: Trajectories of a chain whose actions are imitated: the last and best one, or all that
        a policy acted in.
      seed: Decides the chains and the initial weights; all seeds share the data.
      resume: Go on with the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run. Default: runs/TASK-PRESET-seedSEED.
      data: Folder of the data. Default: $AGENTIC_RING_DATA, or else data.
      collector: ExoRL collector to read, such as rnd. Default: the one that is there; if there is
        none, data is collected here and now.
      dry_run: Only print parameters, tokens a sequence and compiled bytes per device; needs no data.
      hardware: With --dry-run, a machine that need not be here, such as 8xH100 or TPUv5e-256: is the step
        too large for it? Default: the devices that are here.
      wandb: Also log to this Weights & Biases project; offline if there is no API key.
      distributed: Join the other processes of a multi-host job (Slurm, Kubernetes, Cloud TPU, or by
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID).
    """
    simulate_cpu_devices(SIMULATED_DEVICES)
    if hardware is not None:
        if not dry_run:
            raise ConfigError("--hardware compiles for a machine that need not be here; add --dry-run")
        jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    if distributed:
        join_processes()
    on_cpu = jax.default_backend() == "cpu"
    name = preset or ("demo" if on_cpu else "small")
    chosen = PRESETS[name]
    if num_trajectories is not None:
        chosen = chosen.with_trajectories(num_trajectories)
    parsed = parse_task(task)
    if action_repeat is not None:
        chosen = chosen.with_action_repeat(parsed.domain, action_repeat)
    if updates is not None:
        chosen = chosen.with_updates(updates)
    absent = None if hardware is None else machine(hardware)
    devices = jax.devices() if absent is None else absent.compile_target().devices
    mesh = make_mesh(shape_with_ring(ring, len(devices)), devices)
    here = f"{jax.device_count()} {jax.default_backend()} devices"
    say(f"preset {name} on {absent.name if absent else here}, mesh {dict(mesh.shape)}")
    if dry_run:
        print_plan(chosen, parsed, mesh, absent)
        return

    directory = output or Path("runs") / f"{task}-{name}-seed{seed}"
    stages = Stages()
    with stages.stage("data"):
        with first_process_first("data"):
            store = prepare_store(parsed.domain, data or data_root(), collector)
        config = resolve(chosen, name, parsed, store, mesh, loss_extent, seed)
    first_process = jax.process_index() == 0
    with first_process_first("directory"):
        enter_directory(directory, config, resume or not first_process)
    if first_process:
        stages.keep_in(directory)
    model = Model(config.model)
    with stages.stage("training"):
        state = train_on_store(config, model, mesh, directory, wandb)
    with stages.stage("evaluation"):
        report = evaluate_returns(config, model, state.params, mesh)
    with stages.stage("memory"):
        memory = train_step(chosen, parsed, config.chains.action_repeat, mesh).memory()
    figures = all_figures(report, memory, directory, paper.exorl_return(task))
    if not first_process:
        return
    write_report(config, report, figures, stages, directory)
    rich.print(figure_table(figures, f"{task}, preset {name}, seed {seed}"))
    print(paper.RETURN_CAVEAT)
    print(f"written to {directory}: config.json, metrics.jsonl, results.json, checkpoints and plots")


if __name__ == "__main__":
    cli.run(main)
