"""Training metrics: one JSON object per line on disk, and optionally Weights & Biases."""

import json
import os
from pathlib import Path
from typing import Any

import jax

from agentic_ring.errors import DataError
from agentic_ring.files import replacing


class MetricsLog:
    """Writes rows of metrics on process 0; on other processes it does nothing.

    Args:
      path: the JSONL file.
      resume_step: rows after this step are removed, since the run repeats them.
      wandb_project: project of Weights & Biases to log to as well; offline unless an API key is set
        (``wandb sync`` uploads later).
      config: configuration shown by Weights & Biases.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int,
        wandb_project: str | None = None,
        config: dict[str, Any] | None = None,
    ):
        self._active = jax.process_index() == 0
        self._path = path
        self._wandb = None
        if not self._active:
            return
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step] if path.exists() else []
        with replacing(path) as beside:
            beside.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")
        if wandb_project is not None:
            import wandb  # slow to import, and only needed here

            mode = None if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") else "offline"
            self._wandb = wandb.init(
                project=wandb_project, name=path.parent.name, dir=path.parent, config=config, mode=mode
            )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one row and flushes it to the file."""
        if not self._active:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Closes the log."""
        if self._active:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a metrics file; an incomplete last line after a crash is skipped.

    Raises:
      DataError: another line is not a JSON object with a step.
    """
    rows = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number} is not a row of metrics: {line[:80]!r}") from error
        rows.append(row)
    return rows
