"""Return against the number of trajectories in context, at a fixed trained model.

    python experiments/context_length.py --run runs/walker_run-demo-seed0

The paper argues for long context by what more trajectories in it are worth (arXiv 2310.01889, section 5.3).
A point is one trial, in many environments, behind a prompt of stored trajectories in ascending return: n
trajectories in context, the one that is being rolled out included. Only the prompt differs between points:
model, target, environments and initial states are the same. Points that are done are kept, and not measured
again.

A model that was trained on chains of fewer trajectories extrapolates; the script says where.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import rich
from jax.sharding import Mesh

from agentic_ring import cli
from agentic_ring.data.tasks import parse_task
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files import replacing
from agentic_ring.inference import ContextBytes
from agentic_ring.mesh import make_mesh, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP
from agentic_ring.progress import say
from agentic_ring.run import RunConfig, load_config
from agentic_ring.run_folder import enter_directory
from agentic_ring.training.state import Model
from evals.dmc_returns import load_params, roll_out
from evals.intervals import mean_interval
from evals.local_memory import check_bytes_here
from evals.plots import BLUE, GREEN, ORANGE, PINK, error_bars, legend_below, save, titled_canvas
from evals.results import Figure, Results, figure_table, write_results
from evals.rollout_policies import context_bytes, in_context_policies, plan_of
from evals.rows import write_rows


@dataclass(frozen=True)
class ContextLengthConfig:
    """What all points have in common.

    Attributes:
      runs: folders of the main job's runs.
      checkpoint: of each of them.
      environments: at once, each with its own seed.
      first_seed: of the first environment.
    """

    runs: tuple[str, ...]
    checkpoint: Literal["last", "best"]
    environments: int
    first_seed: int


@dataclass(frozen=True)
class Point:
    """One trial behind a prompt.

    Attributes:
      run: name of the run.
      trajectories: in context, the trial included.
      trained: those of the chains that the model was trained on.
      tokens: of the trajectories in context, when the trial ends.
      prompt_bytes, environments_bytes: of the caches.
      reading_seconds: of encoding the prompt, compilation included.
      trial_seconds: of the trial.
      returns: one for each environment.
    """

    run: str
    trajectories: int
    trained: int
    tokens: int
    prompt_bytes: int
    environments_bytes: int
    reading_seconds: float
    trial_seconds: float
    returns: tuple[float, ...]

    def figure(self) -> Figure:
        """Mean return with its interval over the environments."""
        name = f"return/{self.run}/{self.trajectories}_trajectories"
        return Figure.of(name, mean_interval(self.returns), "return")


@dataclass(frozen=True)
class TrainedRun:
    """A run of the main job, to be rolled out behind prompts; ``config`` evaluates one trial."""

    folder: Path
    config: RunConfig
    mesh: Mesh

    @classmethod
    def of(cls, folder: Path, settings: ContextLengthConfig) -> "TrainedRun":
        """The run in this folder."""
        config = load_config(folder)
        evaluation = replace(
            config.evaluation,
            trials=1,
            environments=settings.environments,
            first_seed=settings.first_seed,
        )
        devices = math.prod(size or 1 for size in asdict(config.mesh).values())
        mesh = make_mesh(config.mesh, jax.devices()[:devices])
        return cls(folder, replace(config, evaluation=evaluation), mesh)

    @property
    def decisions(self) -> int:
        """Of a trajectory."""
        return -(-parse_task(self.config.task).domain.episode_steps // self.config.chains.action_repeat)

    def behind(self, trajectories: int) -> RunConfig:
        """The configuration of a trial with so many trajectories in context."""
        evaluation = replace(self.config.evaluation, prompt_trajectories=trajectories - 1)
        return replace(self.config, evaluation=evaluation)

    def context_bytes(self, trajectories: int) -> ContextBytes:
        """What the caches take, before they are made."""
        plan = plan_of(self.behind(trajectories), self.mesh)
        of_each = ContextBytes.planned(
            self.config.model,
            self.config.evaluation.environments // plan.policies,
            self.decisions,
            (trajectories - 1) * self.decisions,
            plan.mesh.shape["ring"],
        )
        return replace(of_each, environments=plan.policies * of_each.environments)

    def describe(self, trajectories: int) -> str:
        """The point in words: tokens, bytes, and whether the model knows contexts of that length."""
        size, trained = self.context_bytes(trajectories), self.config.chains.trajectories
        tokens = trajectories * self.decisions * TOKENS_PER_STEP
        words = (
            f"{self.folder.name}, {trajectories} trajectories: {tokens:,} tokens, cache "
            f"{size.prompt / 1e6:,.1f} MB of the prompt and {size.environments / 1e6:,.1f} MB of the trials"
        )
        if trajectories > trained:
            words += f"; EXTRAPOLATION: the model was trained on chains of {trained}"
        return words

    def measure(self, trajectories: int, checkpoint: Literal["last", "best"], chunk: int) -> Point:
        """Reads the prompt and rolls out one trial."""
        config = self.behind(trajectories)
        model = Model(config.model)
        params, _ = load_params(self.folder, config, self.mesh, checkpoint)
        started = time.monotonic()
        policies = in_context_policies(config, model, params, self.mesh, chunk)
        read = time.monotonic()
        task, repeat = parse_task(config.task), config.chains.action_repeat
        returns, _ = roll_out(policies, f"trial behind {trajectories - 1}", task, repeat, config.evaluation)
        size = context_bytes(policies)
        return Point(
            run=self.folder.name,
            trajectories=trajectories,
            trained=config.chains.trajectories,
            tokens=trajectories * self.decisions * TOKENS_PER_STEP,
            prompt_bytes=size.prompt,
            environments_bytes=size.environments,
            reading_seconds=read - started,
            trial_seconds=time.monotonic() - read,
            returns=tuple(returns[:, 0].tolist()),
        )


def read_point(path: Path) -> Point:
    """A point that was measured before.

    Raises:
      DataError: the file holds none.
    """
    try:
        content = json.loads(path.read_text())
        return Point(**{**content, "returns": tuple(content["returns"])})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} is no point of this curve ({error!r}); delete it to measure it again"
        ) from error


def write_point(path: Path, point: Point) -> None:
    """Writes a point, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(json.dumps(asdict(point)) + "\n")


def plot_points(path: Path, points: Sequence[Point]) -> None:
    """Return against trajectories in context, a curve a run; hollow beyond what the run was trained on."""
    canvas, axes = titled_canvas("Return by trajectories in context")
    for number, run in enumerate(dict.fromkeys(point.run for point in points)):
        colour = (BLUE, ORANGE, GREEN, PINK)[number % 4]
        own = sorted((point for point in points if point.run == run), key=lambda point: point.trajectories)
        counts = np.array([point.trajectories for point in own])
        intervals = [mean_interval(point.returns) for point in own]
        values = np.array([interval.value for interval in intervals])
        label = f"{run} (trained on {own[0].trained}, {intervals[0].n} environments)"
        axes.errorbar(counts, values, yerr=error_bars(intervals), color=colour, capsize=4, label=label)
        known = counts <= own[0].trained
        axes.plot(counts[known], values[known], "o", color=colour)
        axes.plot(counts[~known], values[~known], "o", color=colour, markerfacecolor="white")
    axes.set_xscale("log", base=2)
    counts = sorted({point.trajectories for point in points})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("trajectories in context, with the one rolled out; hollow: more than trained on")
    axes.set_ylabel("mean return (sum of rewards); bars: 95%")
    legend_below(canvas, axes)
    save(canvas, path)


def write_all(directory: Path, settings: ContextLengthConfig, points: Sequence[Point]) -> list[Figure]:
    """Writes ``results.json``, ``context_length.csv`` (a row an environment) and the plot; the figures."""
    figures = [point.figure() for point in points]
    seconds = {
        f"{point.run}/{point.trajectories}": point.reading_seconds + point.trial_seconds for point in points
    }
    write_results(directory / "results.json", Results.of_this_process(asdict(settings), seconds, figures))
    rows: list[dict[str, Any]] = []
    for point in points:
        cells = {name: value for name, value in asdict(point).items() if name != "returns"}
        seeds = range(settings.first_seed, settings.first_seed + settings.environments)
        rows += [
            {**cells, "environment_seed": seed, "return": value}
            for seed, value in zip(seeds, point.returns, strict=True)
        ]
    write_rows(directory / "context_length.csv", rows)
    plot_points(directory / "context_length.png", points)
    return figures


def main(
    run: tuple[Path, ...],
    trajectories: tuple[int, ...] = (1, 4, 16, 32, 64, 128),
    environments: int = 16,
    first_seed: int = 20_000,
    checkpoint: Literal["last", "best"] = "last",
    prompt_chunk: int = 1024,
    output: Path = Path("runs/context_length"),
    dry_run: bool = False,
) -> None:
    """Measures returns behind prompts of several lengths.

    Args:
      run: Folders of trained runs, such as runs/walker_run-demo-seed0.
      trajectories: In context, the one that is rolled out included.
      environments: At once; the intervals are over them.
      first_seed: Seed of the first environment.
      checkpoint: The newest one, or the one with the lowest training loss.
      prompt_chunk: Decisions of the prompt encoded at a time; a multiple of the devices.
      output: Folder of the results; the same command goes on where it stopped.
      dry_run: Only print tokens and bytes.
    """
    if min(trajectories, default=0) < 1:
        raise ConfigError(f"trajectories is {trajectories}; give numbers of at least 1")
    names = [folder.name for folder in run]
    if len(set(names)) < len(names):
        raise ConfigError(f"the runs {', '.join(names)} are told apart by name; give each once")
    simulate_cpu_devices(8)
    settings = ContextLengthConfig(tuple(map(str, run)), checkpoint, environments, first_seed)
    wanted = [
        (TrainedRun.of(folder, settings), count) for folder in run for count in sorted(set(trajectories))
    ]
    for trained, count in wanted:
        say(trained.describe(count))
        size = trained.context_bytes(count)
        check_bytes_here(size.prompt + size.environments, trained.mesh.size)
    if dry_run:
        return
    enter_directory(output, settings, resume=True)
    points = []
    for trained, count in wanted:
        path = output / "points" / f"{trained.folder.name}-{count}.json"
        if not path.exists():
            write_point(path, trained.measure(count, checkpoint, prompt_chunk))
        points.append(read_point(path))
        write_all(output, settings, points)
    rich.print(figure_table([point.figure() for point in points], "return by trajectories in context"))
    for trained, count in wanted:
        if count > trained.config.chains.trajectories:
            print(f"extrapolation: {trained.describe(count)}")
    print(f"written to {output}: results.json, context_length.csv and context_length.png")


if __name__ == "__main__":
    cli.run(main)
