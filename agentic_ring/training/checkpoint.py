"""Checkpoints of a run: saved asynchronously; the last one and the best one are kept.

    run/checkpoints/{step}/                     a whole checkpoint
        state/, data/                           train state and data iterator, as orbax writes them
        loss.json                               {"loss": mean loss since the last one with a loss, or null}
        SHA256SUMS                              digest of each other file
    run/checkpoints/checkpoint.{step}.partial   one that is being written
    run/last_checkpoint                         step of the newest checkpoint

A folder gets its step as its name once all its files and their digests are on the disk, so an interruption at
any moment leaves the previous checkpoint intact. Every file is compared with its digest before weights are
restored. ``last_checkpoint`` tells a run whose checkpoints were deleted from one that has not saved yet.
"""

import errno
import json
import logging
import math
import shutil
import sys
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from agentic_ring.errors import CheckpointError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import flush, replacing
from agentic_ring.stopping import uninterrupted
from agentic_ring.training.checkpoint_digests import check_digests, listed_digests, write_digests
from agentic_ring.training.train_step import TrainState

with needs_extra("models"):
    from orbax.checkpoint import v1 as ocp

_LOSS = "loss.json"
_CLOSED_LOOP = "Event loop is closed"


def _not_orbax_stack(record: logging.LogRecord) -> bool:
    """Orbax logs a failed write with its stack, once per thread, and raises the same error for the user."""
    return record.exc_info is None or "orbax" not in Path(record.pathname).parts


@cache
def _hide_closed_loops() -> None:
    """Hides what tensorstore's threads print where a failed write has closed orbax's loop under others."""
    report = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, RuntimeError) or str(unraisable.exc_value) != _CLOSED_LOOP:
            report(unraisable)

    sys.unraisablehook = hook


class SavedCheckpoints:
    """Read access to the checkpoints of a run, which another process may be training.

    Args:
      directory: folder of the checkpoints; nothing in it is changed.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._record = directory.with_name("last_checkpoint")

    @property
    def last_step(self) -> int | None:
        """Step of the newest checkpoint; None if the run has saved none yet.

        Raises:
          CheckpointError: the newest one was deleted.
        """
        steps = self._steps()
        newest = steps[-1] if steps else 0
        saved = self._recorded_step()
        if newest < saved:
            start = f"step {newest}" if steps else "the start"
            raise CheckpointError(
                f"the run has saved checkpoint {saved}, but {self._directory} holds {steps or 'none'}. Put "
                f"it back, or start a new run (--no-resume). To go on from {start}, delete {self._record}"
            )
        return newest or None

    def _recorded_step(self) -> int:
        if not self._record.exists():
            return 0
        content = self._record.read_bytes()
        try:
            return int(content)
        except ValueError as error:
            raise CheckpointError(
                f"{self._record} holds {content[:20]!r}, expected the step of the newest checkpoint, such as "
                f"{self._steps()}. Write it there, or start a new run (--no-resume)"
            ) from error

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint with the lowest loss, the first of equals; None if there is none.

        Without any loss it is the newest one.

        Raises:
          CheckpointError: a loss is damaged, or the newest checkpoint was deleted.
        """
        if self.last_step is None:
            return None
        return min(self._steps(), key=self._rank)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Restores the state with the shapes and shardings of ``like``, and the data iterator's state.

        Every process of a job must call it; each verifies an equal share of the files.

        Raises:
          CheckpointError: a file is missing or damaged, or the checkpoint is of another configuration.
        """
        folder = self._directory / str(step)
        self._verify(folder)
        try:
            loaded = self._load(folder, like)
        except Exception as error:  # orbax raises many types for the same error of a user
            if not folder.exists():
                raise self._deleted(step) from error
            cause = textwrap.shorten(str(error), 300)  # orbax prints every array's shape and sharding
            raise CheckpointError(
                f"checkpoint {step} in {self._directory} cannot be read with this configuration: {cause}. "
                "Use the flags with which it was written, or choose another --output to start a new run"
            ) from error
        return loaded["state"], loaded["data"]

    @uninterrupted
    def _load(self, folder: Path, like: TrainState) -> dict[str, Any]:
        # After an exception here orbax's threads would read on, and each prints a traceback once it finds the
        # event loop closed.
        return ocp.load_checkpointables(str(folder.absolute()), {"state": like, "data": None})

    def _verify(self, folder: Path) -> None:
        failure: CheckpointError | None = None
        try:
            digests = listed_digests(folder)
            check_digests(folder, digests, sorted(digests)[jax.process_index() :: jax.process_count()])
        except CheckpointError as error:
            failure = error if folder.exists() else self._deleted(int(folder.name))
        # Every process learns of it: one that went on would wait for the others for ever.
        failed = multihost_utils.process_allgather(np.array([failure is not None]), tiled=True)
        if failure is not None:
            raise failure
        if failed.any():
            raise CheckpointError(
                f"{folder} is damaged; see the message of process {failed.argmax()} of the job"
            )

    def _deleted(self, step: int) -> CheckpointError:
        return CheckpointError(
            f"there is no checkpoint {step} in {self._directory}; if the run goes on training, which deletes "
            "older checkpoints, run the same command again to read the newest one"
        )

    def _steps(self) -> list[int]:
        """Steps of all whole checkpoints, in ascending order."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def _rank(self, step: int) -> tuple[float, int]:
        """Sorts checkpoints, the best one first."""
        folder = self._directory / str(step)
        check_digests(folder, listed_digests(folder), [_LOSS])
        loss = json.loads((folder / _LOSS).read_text())["loss"]
        return (math.inf, -step) if loss is None else (loss, step)


class Checkpoints(SavedCheckpoints):
    """The checkpoints of a run in this process, which alone writes to its folder.

    A checkpoint holds the train state and the state of the data iterator, so that a resumed run sees the
    same batches and ends with the same weights, bit for bit.

    Args:
      directory: folder of the checkpoints; created if missing. Unfinished and superseded ones in it, which
        a killed process leaves behind, are deleted.

    Raises:
      CheckpointError: the loss of a checkpoint is damaged.
    """

    def __init__(self, directory: Path):
        super().__init__(directory)
        logging.getLogger("absl").addFilter(_not_orbax_stack)
        _hide_closed_loops()
        directory.mkdir(parents=True, exist_ok=True)
        self._writes = jax.process_index() == 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._remove_unfinished()
        self._remove_superseded()

    @property
    def last_step(self) -> int | None:
        """As of ``SavedCheckpoints``, once the one that is being saved is whole."""
        self.wait()
        return super().last_step

    def save(self, step: int, state: TrainState, data_state: dict[str, Any], loss: float | None) -> None:
        """Starts saving; returns once the state has been copied off the devices.

        A checkpoint without a loss is kept only until the next one.

        Raises:
          OSError: the disk was full, now or while the previous checkpoint was written.
          CheckpointError: writing failed for another reason.
        """
        self.wait()
        path = str(self._partial(step).absolute())
        try:
            response = ocp.save_checkpointables_async(path, {"state": state, "data": data_state})
        except Exception as error:  # as in restore
            raise self._failure(error) from error
        self._saving = self._thread.submit(self._finish, step, loss, response)

    def wait(self) -> None:
        """Waits until all checkpoints are on disk.

        Raises:
          OSError, CheckpointError: as in ``save``.
        """
        if self._saving is None:
            return
        try:
            self._saving.result()
        except Exception as error:  # as in restore
            self._saving = None
            raise self._failure(error) from error
        self._saving = None

    def close(self) -> None:
        """Waits until all checkpoints are on disk, and releases the thread that writes them.

        Raises:
          OSError, CheckpointError: as in ``save``.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _finish(self, step: int, loss: float | None, response: ocp.AsyncResponse[None]) -> None:
        """Completes a checkpoint once orbax has written its part of it on every process."""
        response.result()
        if not self._writes:
            return
        folder = self._partial(step)
        (folder / _LOSS).write_text(json.dumps({"loss": loss}) + "\n")
        write_digests(folder)
        self._remove(step)
        folder.rename(self._directory / str(step))
        flush(self._directory)
        with replacing(self._record) as beside:
            beside.write_text(f"{step}\n")
        self._remove_superseded()

    def _failure(self, error: Exception) -> Exception:
        """The error for the user after a failed save, whose files are deleted."""
        self._remove_unfinished()
        if isinstance(error, CheckpointError):
            return error
        if "No space left on device" in str(error):  # by whichever library
            return OSError(errno.ENOSPC, "No space left on device", str(self._directory))
        return CheckpointError(f"a checkpoint could not be written to {self._directory}: {error}")

    def _partial(self, step: int) -> Path:
        return self._directory / f"checkpoint.{step}.partial"

    def _remove(self, step: int) -> None:
        """Deletes a checkpoint, if there is one of this step, which at no moment looks like a whole one."""
        folder = self._directory / str(step)
        if folder.exists():
            removed = self._directory / f"removed.{step}.partial"
            folder.rename(removed)
            shutil.rmtree(removed)

    def _remove_superseded(self) -> None:
        """Deletes all checkpoints but the last one and the best one."""
        steps = self._steps()
        if self._writes and len(steps) > 1:
            for old in {*steps} - {steps[-1], min(steps, key=self._rank)}:
                self._remove(old)

    def _remove_unfinished(self) -> None:
        """Deletes what is not whole, also what threads of orbax still write after a failed save."""
        for _ in range(20 if self._writes else 0):
            unfinished = [*self._directory.glob("*.partial*")]  # orbax appends to the name while it writes
            if not unfinished:
                return
            for path in unfinished:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.05)
