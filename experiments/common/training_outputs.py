"""Checkpoints and metrics that training writes to a folder."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentic_ring.run_folder import Dataclass
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.metrics_log import MetricsLog, read_metrics


@contextmanager
def training_outputs(
    directory: Path, config: Dataclass, wandb_project: str | None = None
) -> Iterator[tuple[Checkpoints, MetricsLog]]:
    """Opens a folder's checkpoints, and its metrics after the newest checkpoint; closes both."""
    with closing(Checkpoints(directory / "checkpoints")) as checkpoints:
        path, step = directory / "metrics.jsonl", checkpoints.last_step or 0
        with closing(MetricsLog(path, step, wandb_project, asdict(config))) as metrics:
            yield checkpoints, metrics


def read_stage_metrics(directory: Path, stage_steps: Sequence[int]) -> list[dict[str, Any]]:
    """The metrics of the folders stage1, stage2, ..., with steps counted over all stages."""
    return [
        row | {"step": row["step"] + sum(stage_steps[:index])}
        for index in range(len(stage_steps))
        for row in read_metrics(directory / f"stage{index + 1}" / "metrics.jsonl")
    ]
