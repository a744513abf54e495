"""One set of weights, told task after task of its domain: returns, and a picture of what it does.

    python evals/told_tasks.py --run walker

rolls out a policy of ``--conditioning context`` in all tasks of its domain at once: with nothing in context,
and told by the stored trajectories that it keeps, relabelled for each task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import rich
import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring.data.domains import Task, parse_task
from agentic_ring.data.recorded_environments import open_environments
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.data.told_chains import RewardScale
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ArgumentError
from agentic_ring.files.run_folder import Stages
from agentic_ring.inference.told_policy import told_prompt
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Params
from agentic_ring.policies.policy import load_params, policy_folder, policy_trajectories
from agentic_ring.provenance import usable_cores
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.rollouts.told_returns import as_told, run_recorded, told_policy
from agentic_ring.rollouts.trials import RandomPolicy, TrialPolicy
from agentic_ring.run import ToldRunConfig, load_told_config
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from evals.plots import Canvas, save
from evals.report_page.filmstrip import RenderingError, evenly_spaced, graphics_libraries, render

FRAMES = 9
"""Of each film, of which the picture shows the first environment's."""


def evaluate_tasks(
    config: ToldRunConfig, params: Params, kept: ToldDecisions, environments: int, seed: int
) -> tuple[dict[str, np.ndarray], list[Episode]]:
    """Rolls out a model in E environments of each of its domain's tasks.

    Returns:
      Undiscounted returns float64 [tasks, E] by name: ``nothing_told``, ``told``, ``random_policy``, and
      float64 [tasks, n] ``kept`` of the trajectories that tell; and the episode of each task's first
      environment, told.
    """
    task, chains = parse_task(config.task), config.chains
    tasks, steps = [Task(task.domain, name) for name in task.domain.tasks], task.domain.episode_steps
    rewards = [task_reward(each) for each in tasks]
    paid = np.stack([kept.rewards(reward) for reward in rewards])
    scales, rewarded = as_told(chains, paid)
    observation, action = (np.stack([each] * len(tasks)) for each in (kept.observation, kept.action))
    prompt = told_prompt(chains, observation, action, rewarded)
    number = np.arange(len(tasks)).repeat(environments)
    seeds = seed + np.tile(np.arange(environments), len(tasks))
    scale = RewardScale(*(np.asarray(each)[number] for each in scales))
    policy = told_policy(config, params, make_mesh(MeshShape(), jax.devices()[:1]), scale, 1, seed)
    starts, repeat = [tasks[each] for each in number], chains.action_repeat
    with open_environments(task.domain, starts, rewards, repeat, usable_cores()) as opened:

        def returns(acting: TrialPolicy, label: str) -> np.ndarray:
            found, _ = run_recorded(acting, opened, seeds, 1, label, number)
            return found.reshape(len(tasks), environments)

        chance = returns(RandomPolicy(len(number), task.domain.action_dim, seed), "random policy")
        nothing = returns(policy, "nothing told")
        policy.start_over(jax.tree.map(lambda field: field[number], prompt))
        told = returns(policy, f"told by {len(kept.action)} trajectories")
        films = opened.episodes()[::environments]
    of_kept = steps * paid.mean(axis=2, dtype=np.float64)
    named = {"nothing_told": nothing, "told": told, "random_policy": chance, "kept": of_kept}
    return named, films


def task_figures(tasks: Sequence[str], returns: Mapping[str, np.ndarray]) -> list[Figure]:
    """The mean of each row of returns, as a figure NAME/TASK."""
    return [
        Figure.from_interval(f"{name}/{task}", mean_interval(each, over), "return")
        for name, rows in returns.items()
        for over in ["trajectories" if name == "kept" else "environments"]
        for task, each in zip(tasks, rows, strict=True)
    ]


def returns_table(tasks: tuple[str, ...], returns: Mapping[str, np.ndarray], title: str) -> Table:
    """The mean returns of each task, with those of the trajectories that tell."""
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title_justify = "left"
    table.add_column("task")
    for column in ("random policy", "nothing told", "told", "context: mean", "best"):
        table.add_column(column, justify="right")
    for index, name in enumerate(tasks):
        means = [returns[each][index].mean() for each in ("random_policy", "nothing_told", "told", "kept")]
        table.add_row(name, *(f"{mean:.0f}" for mean in (*means, returns["kept"][index].max())))
    return table


def plot_films(
    path: Path,
    config: ToldRunConfig,
    returns: Mapping[str, np.ndarray],
    films: list[Episode],
    libraries: Sequence[str],
) -> None:
    """Draws frames of each task's film in a row, below its returns.

    Raises:
      RenderingError: no graphics library on this machine can render.
    """
    task = parse_task(config.task)
    rows = evenly_spaced(len(films[0].physics), FRAMES)
    canvas = Canvas(figsize=(1.6 * FRAMES, 1.55 * len(films)), layout="constrained")
    canvas.suptitle(f"{task.domain.name}: one set of weights, told each task", fontweight="bold")
    strips = canvas.subfigures(len(films), 1, squeeze=False)[:, 0]
    for index, (name, film) in enumerate(zip(task.domain.tasks, films, strict=True)):
        frames = render(Task(task.domain, name), film.physics[rows], libraries)
        told, nothing = (returns[each][index].mean() for each in ("told", "nothing_told"))
        title = f"{name}: return {told:.0f}; {nothing:.0f} with nothing told"
        strips[index].suptitle(title, x=0.01, ha="left", fontsize="medium")
        for panel, frame in zip(strips[index].subplots(1, FRAMES), frames, strict=True):
            panel.imshow(frame)
            panel.set_axis_off()
    save(canvas, path)


def main(
    run: str | Path,
    environments: Annotated[int, tyro.conf.arg(metavar="N")] = 6,
    first_seed: Annotated[int, tyro.conf.arg(metavar="SEED")] = 10_000,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> None:
    """Rolls out one set of weights in all tasks of its domain, told by relabelled trajectories.

    Args:
      run: Name of a shipped policy, such as walker, or folder of a run or of an exported policy.
      environments: Number of environments for each task.
      first_seed: Seed of the first environment of each task; the others have the next ones.
      output: Folder for the returns and the picture. Default: runs/DOMAIN-tasks.
    """
    libraries = graphics_libraries()
    folder = policy_folder(run)
    config, stages = load_told_config(folder), Stages()
    domain = parse_task(config.task).domain
    for flag, value, least in (("environments", environments, 1), ("first-seed", first_seed, 0)):
        if value < least:
            raise ArgumentError(f"--{flag} is {value}; it must be at least {least}")
    directory = output or Path("runs") / f"{domain.name}-tasks"
    with stages.stage("evaluation"):
        params, _ = load_params(folder, config, make_mesh(MeshShape(), jax.devices()[:1]))
        kept = policy_trajectories(folder, config)
        returns, films = evaluate_tasks(config, params, kept, environments, first_seed)
    rich.print(
        returns_table(domain.tasks, returns, f"{folder.name}, told by {len(kept.action)} trajectories")
    )
    try:
        with stages.stage("picture"):
            plot_films(directory / "tasks.png", config, returns, films, libraries)
    except RenderingError as error:
        say(f"no picture: {error}")
    figures = task_figures(domain.tasks, returns)
    results = Results.of_this_process(asdict(config), stages.seconds, figures)
    write_results(directory / "results.json", results)
    print(f"written to {directory}: results.json and tasks.png")


if __name__ == "__main__":
    cli.run(main)
