"""Return against the number of trajectories in context, at a fixed trained model.

    python experiments/context_length.py --run runs/walker_run-demo-seed0

The paper argues for long context by the value of more trajectories in it (arXiv 2310.01889, section 5.3).
A point is one trial, in many environments, after a prompt of stored trajectories in ascending return; its n
trajectories include the one that is rolled out. Only the prompt differs between points: model, target,
environments and initial states are the same. Finished points are kept and not measured again.

A model trained on chains of fewer trajectories extrapolates; the script says where.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import rich

from agentic_ring.data.domains import parse_task
from agentic_ring.device_memory import check_memory
from agentic_ring.errors import ConfigError
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.files.run_folder import enter_directory
from agentic_ring.inference.in_context_policy import ContextBytes
from agentic_ring.mesh import mesh_on_first_devices, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP
from agentic_ring.models.model import Model
from agentic_ring.policies.policy import checkpoint_step, load_params
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, figure_table, write_results
from agentic_ring.results.rows import write_rows
from agentic_ring.rollouts.policies import context_bytes, in_context_policies, rollout_plan
from agentic_ring.rollouts.returns import roll_out
from agentic_ring.run import RunConfig, load_config
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from evals.plots import PALETTE, draw_intervals, legend_below, save, titled_canvas

Checkpoint = Literal["last", "best"]


@dataclass(frozen=True)
class ContextLengthConfig:
    """Settings that all points share: flags of ``main``, and the identity of each run's model."""

    runs: tuple[str, ...]
    models: tuple[str, ...]
    checkpoint: Checkpoint
    environments: int
    first_seed: int


@dataclass(frozen=True)
class Point:
    """One trial after a prompt of stored trajectories.

    Attributes:
      trajectories, trained: trajectories in context, including the trial, and per chain in training.
      tokens: tokens in context at the end of the trial.
      prompt_bytes, environments_bytes: cache memory of the prompt and of the trials.
      reading_seconds: time to encode the prompt, including compilation.
      returns: return in each environment.
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
        return Figure.from_interval(name, mean_interval(self.returns), "return")


def read_point(path: Path) -> Point:
    """Reads a point that was measured before; raises a DataError if the file does not hold one."""
    return read_json(path, Point, "delete it to measure it again")


def plot_points(path: Path, points: Sequence[Point]) -> None:
    """Plots return against trajectories in context, one curve per run; extrapolated points are hollow."""
    canvas, axes = titled_canvas("Return by trajectories in context")
    for number, run in enumerate(dict.fromkeys(point.run for point in points)):
        colour = PALETTE[number % len(PALETTE)]
        own = sorted((point for point in points if point.run == run), key=lambda point: point.trajectories)
        intervals = [mean_interval(point.returns) for point in own]
        label = f"{run} (trained on {own[0].trained}, {intervals[0].n} environments)"
        counts = [point.trajectories for point in own]
        draw_intervals(axes, counts, intervals, color=colour, capsize=4, label=label)
        for point, interval in zip(own, intervals, strict=True):
            face = colour if point.trajectories <= point.trained else "white"
            axes.plot(point.trajectories, interval.value, "o", color=colour, markerfacecolor=face)
    axes.set_xscale("log", base=2)
    counts = sorted({point.trajectories for point in points})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("trajectories in context, with the one rolled out; hollow: more than trained on")
    axes.set_ylabel("mean return (sum of rewards); bars: 95%")
    legend_below(canvas, axes)
    save(canvas, path)


def write_curve(directory: Path, settings: ContextLengthConfig, points: Sequence[Point]) -> None:
    """Writes ``results.json``, ``context_length.csv`` (a row per environment) and the plot."""
    seconds = {f"{p.run}/{p.trajectories}": p.reading_seconds + p.trial_seconds for p in points}
    figures = [point.figure() for point in points]
    write_results(directory / "results.json", Results.of_this_process(asdict(settings), seconds, figures))
    rows: list[dict[str, Any]] = []
    for point in points:
        cells = asdict(point)
        returns = enumerate(cells.pop("returns"), start=settings.first_seed)
        rows += [{**cells, "environment_seed": seed, "return": value} for seed, value in returns]
    write_rows(directory / "context_length.csv", rows)
    plot_points(directory / "context_length.png", points)


class TrainedRun:
    """A run of the main job, to be rolled out for one trial in so many environments after prompts."""

    def __init__(self, folder: Path, environments: int, first_seed: int):
        config = load_config(folder)
        evaluation = replace(config.evaluation, trials=1, environments=environments, first_seed=first_seed)
        self.folder, self.mesh = folder, mesh_on_first_devices(config.mesh)
        self.config = replace(config, evaluation=evaluation)

    def model_identity(self, checkpoint: Checkpoint) -> str:
        """Identifies the model by the digest of its configuration and the checkpoint's step."""
        digest = hashlib.blake2b((self.folder / "config.json").read_bytes(), digest_size=8)
        return f"{digest.hexdigest()}, step {checkpoint_step(self.folder, checkpoint)}"

    def with_context(self, trajectories: int) -> RunConfig:
        """The configuration of a trial with this number of trajectories in context."""
        evaluation = replace(self.config.evaluation, prompt_trajectories=trajectories - 1)
        return replace(self.config, evaluation=evaluation)

    def tokens(self, trajectories: int) -> int:
        """Tokens in context at the end of a trial."""
        return trajectories * self.config.decisions * TOKENS_PER_STEP

    def context_bytes(self, trajectories: int) -> ContextBytes:
        """Cache memory of a point, before it is allocated."""
        config, decisions = self.config, self.config.decisions
        plan = rollout_plan(self.with_context(trajectories), self.mesh)
        rows, prompt = config.evaluation.environments // plan.policies, (trajectories - 1) * decisions
        of_each = ContextBytes.planned(config.model, rows, decisions, prompt, plan.mesh.shape["ring"])
        return replace(of_each, environments=plan.policies * of_each.environments)

    def describe(self, trajectories: int) -> str:
        """Describes a point: tokens, bytes, and whether it is longer than the chains of training."""
        size, trained = self.context_bytes(trajectories), self.config.chains.trajectories
        words = (
            f"{self.folder.name}, {trajectories} trajectories: {self.tokens(trajectories):,} tokens, cache "
            f"{size.prompt / 1e6:,.1f} MB of the prompt and {size.environments / 1e6:,.1f} MB of the trials"
        )
        if trajectories > trained:
            words += f"; EXTRAPOLATION: the model was trained on chains of {trained}"
        return words

    def measure(self, trajectories: int, checkpoint: Checkpoint, chunk: int) -> Point:
        """Encodes the prompt and rolls out one trial."""
        config = self.with_context(trajectories)
        params, _ = load_params(self.folder, config, self.mesh, checkpoint)
        started = time.monotonic()
        policies = in_context_policies(config, Model(config.model), params, self.mesh, chunk)
        read = time.monotonic()
        task, repeat = parse_task(config.task), config.chains.action_repeat
        returns, _ = roll_out(policies, f"trial after {trajectories - 1}", task, repeat, config.evaluation)
        size = context_bytes(policies)
        return Point(
            run=self.folder.name,
            trajectories=trajectories,
            trained=config.chains.trajectories,
            tokens=self.tokens(trajectories),
            prompt_bytes=size.prompt,
            environments_bytes=size.environments,
            reading_seconds=read - started,
            trial_seconds=time.monotonic() - read,
            returns=tuple(returns[:, 0].tolist()),
        )


def main(
    run: tuple[Path, ...],
    trajectories: tuple[int, ...] = (1, 4, 16, 32, 64, 128),
    environments: int = 16,
    first_seed: int = 20_000,
    checkpoint: Checkpoint = "last",
    prompt_chunk: int = 1024,
    output: Path = Path("runs/context_length"),
    dry_run: bool = False,
) -> None:
    """Measures returns after prompts of several lengths.

    Args:
      run: Folders of trained runs, such as runs/walker_run-demo-seed0.
      trajectories: Numbers of trajectories in context, including the one that is rolled out.
      environments: Number of parallel environments; the intervals are over them.
      first_seed: Seed of the first environment.
      checkpoint: The newest checkpoint, or the one with the lowest training loss.
      prompt_chunk: Number of decisions of the prompt encoded at a time; a multiple of the devices.
      output: Folder of the results; the same command continues where it stopped.
      dry_run: Only print tokens and bytes.
    """
    if min(trajectories, default=0) < 1:
        raise ConfigError(f"trajectories is {trajectories}; give numbers of at least 1")
    names = [folder.name for folder in run]
    if len(set(names)) < len(names):
        raise ConfigError(f"the runs {', '.join(names)} are told apart by name; give each once")
    simulate_cpu_devices()
    runs = [TrainedRun(folder, environments, first_seed) for folder in run]
    wanted = [(trained, count) for trained in runs for count in sorted(set(trajectories))]
    for trained, count in wanted:
        say(trained.describe(count))
        size = trained.context_bytes(count)
        check_memory(size.prompt + size.environments, trained.mesh.size)
    if dry_run:
        return
    models = tuple(trained.model_identity(checkpoint) for trained in runs)
    settings = ContextLengthConfig(tuple(map(str, run)), models, checkpoint, environments, first_seed)
    with enter_directory(output, settings, resume=True):
        points = []
        for trained, count in wanted:
            path = output / "points" / f"{trained.folder.name}-{count}.json"
            if not path.exists():
                write_json(path, asdict(trained.measure(count, checkpoint, prompt_chunk)))
            points.append(read_point(path))
            write_curve(output, settings, points)
        rich.print(figure_table([point.figure() for point in points], "return by trajectories in context"))
        for trained, count in wanted:
            if count > trained.config.chains.trajectories:
                print(f"extrapolation: {trained.describe(count)}")
        print(f"written to {output}: results.json, context_length.csv and context_length.png")


if __name__ == "__main__":
    cli.run(main)
