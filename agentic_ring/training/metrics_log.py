"""Training metrics: one JSON object per line on disk, and optionally Weights & Biases."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_row, read_json_rows

_REMEDY = "remove that line, or move the file aside"


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
            beside.write_text("".join(map(json_row, kept)))
        self._file = path.open("a")
        if wandb_project is not None:
            with needs_extra("scripts"):
                import wandb  # slow to import, and only needed here

            mode = None if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") else "offline"
            self._wandb = wandb.init(
                project=wandb_project, name=path.parent.name, dir=path.parent, config=config, mode=mode
            )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one row and flushes it to the file."""
        if not self._active:
            return
        with self._named_errors():
            self._file.write(json_row({"step": step, **values}))
            self._file.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Closes the log."""
        if self._active:
            with self._named_errors():
                self._file.close()
        if self._wandb is not None:
            self._wandb.finish()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Adds the file's name to the error of a failed write, such as on a full disk."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a metrics file; an incomplete last line after a crash is skipped.

    Raises:
      DataError: another line is not an object of numbers with a step of its own.
    """
    rows = read_json_rows(path, dict[str, int | float], _REMEDY)
    last = -1
    for number, row in enumerate(rows, start=1):
        step = row.get("step")
        if not isinstance(step, int) or step <= last:
            raise DataError(f"{path}, line {number} has step {step}, expected more than {last}; {_REMEDY}")
        last = step
    return rows
