"""Return against the number of trajectories in context, at a fixed trained model.

    python experiments/context_length.py --run runs/walker_run-demo-seed0

The paper argues for long context by what more trajectories in it are worth (arXiv 2310.01889, section 5.3).
A point is one trial, in many environments, behind a prompt of stored trajectories in ascending return: n
trajectories in context, the one that is being rolled out included. Only the prompt differs between points:
model, target, environments and initial states are the same. Points that are done are kept, and not measured
again.

A model that was trained on chains of fewer trajectories extrapolates; the script says where.
"""

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import rich
from jax.sharding import Mesh

from agentic_ring import cli
from agentic_ring.data.tasks import parse_task
from agentic_ring.device_memory import check_memory
from agentic_ring.errors import ConfigError
from agentic_ring.inference import ContextBytes
from agentic_ring.mesh import mesh_of_saved, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP
from agentic_ring.models.model import Model
from agentic_ring.progress import say
from agentic_ring.run import RunConfig, load_config
from agentic_ring.run_folder import enter_directory
from evals.common.results import figure_table
from evals.dmc_returns import checkpoint_step, load_params, roll_out
from evals.rollouts.policies import context_bytes, in_context_policies, plan_of
from experiments.exorl.context_curve import ContextLengthConfig, Point, read_point, write_curve, write_point


@dataclass(frozen=True)
class TrainedRun:
    """A run of the main job, to be rolled out behind prompts; ``config`` evaluates one trial."""

    folder: Path
    config: RunConfig
    mesh: Mesh

    @classmethod
    def of(cls, folder: Path, environments: int, first_seed: int) -> "TrainedRun":
        """The run in this folder, to be rolled out in so many environments."""
        config = load_config(folder)
        evaluation = replace(config.evaluation, trials=1, environments=environments, first_seed=first_seed)
        return cls(folder, replace(config, evaluation=evaluation), mesh_of_saved(config.mesh))

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
            self.config.decisions,
            (trajectories - 1) * self.config.decisions,
            plan.mesh.shape["ring"],
        )
        return replace(of_each, environments=plan.policies * of_each.environments)

    def describe(self, trajectories: int) -> str:
        """The point in words: tokens, bytes, and whether the model knows contexts of that length."""
        size, trained = self.context_bytes(trajectories), self.config.chains.trajectories
        tokens = trajectories * self.config.decisions * TOKENS_PER_STEP
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
            tokens=trajectories * self.config.decisions * TOKENS_PER_STEP,
            prompt_bytes=size.prompt,
            environments_bytes=size.environments,
            reading_seconds=read - started,
            trial_seconds=time.monotonic() - read,
            returns=tuple(returns[:, 0].tolist()),
        )


def model_identity(folder: Path, checkpoint: Literal["last", "best"]) -> str:
    """By which a run's model is known again: its configuration's digest, and the checkpoint's step."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8).hexdigest()
    return f"{digest}, step {checkpoint_step(folder, checkpoint)}"


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
    runs = [TrainedRun.of(folder, environments, first_seed) for folder in run]
    wanted = [(trained, count) for trained in runs for count in sorted(set(trajectories))]
    for trained, count in wanted:
        say(trained.describe(count))
        size = trained.context_bytes(count)
        check_memory(size.prompt + size.environments, trained.mesh.size)
    if dry_run:
        return
    models = tuple(model_identity(folder, checkpoint) for folder in run)
    settings = ContextLengthConfig(tuple(map(str, run)), models, checkpoint, environments, first_seed)
    enter_directory(output, settings, resume=True)
    points = []
    for trained, count in wanted:
        path = output / "points" / f"{trained.folder.name}-{count}.json"
        if not path.exists():
            write_point(path, trained.measure(count, checkpoint, prompt_chunk))
        points.append(read_point(path))
        write_curve(output, settings, points)
    rich.print(figure_table([point.figure() for point in points], "return by trajectories in context"))
    for trained, count in wanted:
        if count > trained.config.chains.trajectories:
            print(f"extrapolation: {trained.describe(count)}")
    print(f"written to {output}: results.json, context_length.csv and context_length.png")


if __name__ == "__main__":
    cli.run(main)
