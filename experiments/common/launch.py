"""What the training scripts share: flags, devices, mesh, folder of the run, checkpoints and metrics."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from jax.sharding import Mesh

from agentic_ring.distributed import first_process_first, join_processes
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Dataclass, Settings, Stages, check_same_run, enter_directory
from agentic_ring.mesh import MeshShape, batch_shards, make_mesh, shape_with_ring, simulate_cpu_devices
from agentic_ring.models.model import Params
from agentic_ring.models.pipeline import count_ticks, layers_per_stage, microbatches_per_stage
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from agentic_ring.training.checkpoint import Checkpoints, SavedCheckpoints
from agentic_ring.training.loop import MetricsLog, read_metrics
from agentic_ring.training.optimizer import TrainConfig
from evals.compile.machines import MACHINES, NamedMachine, machine


def default_preset() -> Literal["demo", "small"]:
    """The preset of a command that names none: demo on a CPU, small on anything else."""
    return "demo" if jax.default_backend() == "cpu" else "small"


@dataclass(frozen=True)
class LaunchOptions:
    """Flags of a training script.

    Attributes:
      ring: Devices that each sequence is sharded over; the remaining ones process other sequences.
        Default: all.
      stages: Groups of consecutive layers, each on devices of its own, that form a pipeline. Each stage has
        rings of its own. Default: 1, no pipeline.
      seed: Random seed of the initial weights and of the order of the training data.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run. Default: runs/NAME-PRESET-seedSEED, where NAME is the task or the model.
      dry_run: Only print the number of parameters and the compiled bytes per device; needs no data.
      hardware: With --dry-run, compile for this machine instead, such as 8xH100 or TPUv5e-256, and say
        whether the train step fits its memory. Default: the local devices.
      wandb: Also log to this Weights & Biases project; offline if there is no API key.
      distributed: Join the other processes of a multi-host job (Slurm, Kubernetes, Cloud TPU, or by
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID).
    """

    ring: Annotated[int | None, cli.optional_flag(metavar="DEVICES")] = None
    stages: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    seed: int = 0
    resume: bool = True
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None
    dry_run: Annotated[bool, cli.switch] = False
    hardware: Annotated[
        Literal[tuple(MACHINES)] | None,  # pyright: ignore[reportInvalidTypeForm]
        cli.optional_flag(metavar="NAME"),
    ] = None
    wandb: Annotated[str | None, cli.optional_flag(metavar="PROJECT")] = None
    distributed: Annotated[bool, cli.switch] = False

    def ready_devices(self) -> None:
        """Sets JAX up for these flags; call before anything asks JAX for its devices."""
        simulate_cpu_devices()
        if self.hardware is not None:
            if not self.dry_run:
                raise ConfigError("--hardware compiles for a machine that need not be here; add --dry-run")
            jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
        if self.distributed:
            join_processes()

    @property
    def absent_machine(self) -> NamedMachine | None:
        """The machine to compile for, where it is not this one."""
        return None if self.hardware is None else machine(self.hardware)

    @property
    def leaves_cores(self) -> bool:
        """Whether the mesh is left open, of devices that are simulated on cores that can share rows."""
        is_open = self.ring is None and self.stages == 1 and self.hardware is None
        return is_open and jax.default_backend() == "cpu"

    def mesh(
        self,
        preset: str,
        layers: int,
        shape_of: Callable[[int | None, int, int], MeshShape] = shape_with_ring,
    ) -> Mesh:
        """Builds the mesh of the local devices, or of ``hardware``'s, and says so, with the preset's name.

        ``shape_of`` returns its shape from the ring's size, the number of devices and the number of stages;
        it may leave some devices out.
        """
        absent = self.absent_machine
        devices = jax.devices() if absent is None else absent.compile_target().devices
        shape = shape_of(self.ring, len(devices), self.stages)
        mesh = make_mesh(shape, devices[: math.prod(size or 1 for size in asdict(shape).values())])
        layers_per_stage(layers, self.stages)
        local = f"{jax.device_count()} {jax.default_backend()} devices"
        say(f"preset {preset} on {absent.name if absent else local}, mesh {dict(mesh.shape)}")
        return mesh

    def earlier(self, directory: Path, read: Callable[[Path], Settings]) -> Settings | None:
        """The configuration of the run that is continued in this folder; None for a new run."""
        started = self.resume and (directory / "config.json").exists()
        return read(directory) if started else None

    @contextmanager
    def enter(self, directory: Path, config: Dataclass, stages: Stages) -> Iterator[None]:
        """Enters the run's folder on every process of the job; the first one is its writer.

        See ``enter_directory``.
        """
        with ExitStack() as stack:
            with first_process_first("directory"):
                if jax.process_index() == 0:
                    stack.enter_context(enter_directory(directory, config, self.resume))
                    stages.keep_in(directory)
                else:
                    check_same_run(directory, config)
            yield


def print_pipeline(training: TrainConfig, mesh: Mesh) -> None:
    """Prints the pipeline's schedule for ``--dry-run``, if the mesh has stages."""
    stages = mesh.shape["stage"]
    if stages > 1:
        rows = training.batch_size // batch_shards(mesh) // training.optimizer.accumulation
        microbatches = stages * microbatches_per_stage(rows)
        ticks = count_ticks(stages, microbatches)
        print(
            f"pipeline            {stages} stages, {microbatches} microbatches, "
            f"bubble {(stages - 1) / ticks:.1%} of {ticks} ticks"
        )


@contextmanager
def training_outputs(
    directory: Path, config: Dataclass, wandb_project: str | None = None
) -> Iterator[tuple[Checkpoints, MetricsLog]]:
    """Opens a folder's checkpoints, and its metrics after the newest checkpoint; closes both."""
    with closing(Checkpoints(directory / "checkpoints")) as checkpoints:
        path, step = directory / "metrics.jsonl", checkpoints.last_step or 0
        with closing(MetricsLog(path, step, wandb_project, asdict(config))) as metrics:
            yield checkpoints, metrics


def train_stages(
    directory: Path, count: int, train_stage: Callable[[int, Path, Params | None], Params]
) -> Params:
    """Trains in ``count`` stages from the newest checkpoint, if there is one; returns the last weights.

    Stage k, counted from 1, has checkpoints of its own in the folder stagek. ``train_stage`` trains one, from
    its number, counted from 0, its folder, and the weights of the stage before, which are None for the first
    stage and where the folder has a checkpoint.
    """
    folders = [directory / f"stage{number + 1}" for number in range(count)]
    saved = [SavedCheckpoints(folder / "checkpoints").last_step is not None for folder in folders]
    begun = max((number for number in range(count) if saved[number]), default=0)
    params: Params | None = None
    for number, folder in enumerate(folders):
        if number >= begun:
            params = train_stage(number, folder, params)
        else:  # opening them deletes what a process that was killed at the stage's end left behind
            Checkpoints(folder / "checkpoints").close()
    assert params is not None
    return params


def read_stage_metrics(directory: Path, stage_steps: Sequence[int]) -> list[dict[str, Any]]:
    """The metrics of the folders stage1, stage2, ..., with steps counted over all stages."""
    return [
        row | {"step": row["step"] + sum(stage_steps[:index])}
        for index in range(len(stage_steps))
        for row in read_metrics(directory / f"stage{index + 1}" / "metrics.jsonl")
    ]
