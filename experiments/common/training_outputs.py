"""Checkpoints and metrics that training writes to a folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentic_ring.files.run_folder import Dataclass
from agentic_ring.models.model import Params
from agentic_ring.training.checkpoint import Checkpoints, SavedCheckpoints
from agentic_ring.training.loop import MetricsLog, read_metrics


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
    """Trains in stages, each with checkpoints of its own, from the newest checkpoint if there is one.

    Args:
      directory: folder of the run; stage k, counted from 1, has the folder stagek.
      count: number of stages.
      train_stage: trains a stage, from its number, counted from 0, its folder, and the weights of the stage
        before, which are None for the first stage and where the folder has a checkpoint.

    Returns:
      The weights of the last stage.
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
