"""Checkpoints of a run: saved asynchronously by orbax; the last one and the best one are kept.

    run/checkpoints/{step}/                     a whole checkpoint
        state/, data/                           train state and data iterator, as orbax writes them
        loss.json                               {"loss": mean loss since the last one with a loss, or null}
        SHA256SUMS                              digest of each other file, as ``sha256sum`` writes them
    run/checkpoints/checkpoint.{step}.partial   one that is being written
    run/last_checkpoint                         step of the newest checkpoint

Orbax's own manager keeps no digests of the arrays, and a checkpoint is whole here only once they are written:
so a folder gets its step as its name last, and an interruption leaves the previous checkpoint intact.
``last_checkpoint`` tells a run whose checkpoints were deleted from one that has not saved yet.
"""

import errno
import hashlib
import json
import logging
import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from agentic_ring.errors import CheckpointError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import flush, replacing
from agentic_ring.stopping import deferred
from agentic_ring.training.train_step import TrainState

with needs_extra("models"):
    from orbax.checkpoint import v1 as ocp

_LOSS, _DIGESTS = "loss.json", "SHA256SUMS"


def _not_orbax_stack(record: logging.LogRecord) -> bool:
    """Orbax logs a failed write with its stack, once per thread, and raises the same error for the user."""
    return record.exc_info is None or "orbax" not in Path(record.pathname).parts


@cache
def _hide_closed_loops() -> None:
    """Hides what tensorstore's threads print where a failed write has closed orbax's loop under others."""
    report = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = hook


class SavedCheckpoints:
    """Read access to the checkpoints of a run, which another process may be training; changes nothing."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._record = directory.with_name("last_checkpoint")

    @property
    def last_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none yet, a CheckpointError if it was deleted."""
        steps = self._steps()
        newest = steps[-1] if steps else 0
        recorded = self._record.read_bytes() if self._record.exists() else b"0"
        if not recorded.strip().isdigit():
            raise CheckpointError(
                f"{self._record} holds {recorded[:20]!r}, expected the step of the newest checkpoint, such "
                f"as {steps}. Write it there, or start a new run (--no-resume)"
            )
        if newest < int(recorded):
            start = f"step {newest}" if steps else "the start"
            raise CheckpointError(
                f"the run has saved checkpoint {int(recorded)}, but {self._directory} holds "
                f"{steps or 'none'}. Put it back, or start a new run (--no-resume). To go on from {start}, "
                f"delete {self._record}"
            )
        return newest or None

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint with the lowest loss, the first of equals; None if there is none.

        Without any loss it is the newest one. It raises what ``last_step`` raises, also for a damaged loss.
        """
        return None if self.last_step is None else min(self._steps(), key=self._rank)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Restores the state with the shapes and shardings of ``like``, and the data iterator's state.

        Every process of a job must call it; each verifies an equal share of the files.

        Raises:
          CheckpointError: a file is missing or damaged, or the checkpoint is of another configuration.
        """
        folder = self._directory / str(step)
        try:
            self._verify(folder)
            with deferred():  # threads of orbax would read on after an exception
                loaded = ocp.load_checkpointables(str(folder.absolute()), {"state": like, "data": None})
        except Exception as error:  # orbax raises many types for the same error of a user
            if not folder.exists():
                raise CheckpointError(
                    f"there is no checkpoint {step} in {self._directory}; if the run goes on training, which "
                    "deletes older checkpoints, run the same command again to read the newest one"
                ) from error
            if isinstance(error, CheckpointError):
                raise
            cause = textwrap.shorten(str(error), 300)  # orbax prints every array's shape and sharding
            raise CheckpointError(
                f"checkpoint {step} in {self._directory} cannot be read with this configuration: {cause}. "
                "Use the flags with which it was written, or choose another --output to start a new run"
            ) from error
        return loaded["state"], loaded["data"]

    def _verify(self, folder: Path) -> None:
        failure: CheckpointError | None = None
        try:
            _check(folder, slice(jax.process_index(), None, jax.process_count()))
        except CheckpointError as error:
            failure = error
        # Every process learns of it: one that went on would wait for the others.
        failed = multihost_utils.process_allgather(np.array([failure is not None]), tiled=True)
        if failed.any():
            elsewhere = f"{folder} is damaged; see the message of process {failed.argmax()}"
            raise failure or CheckpointError(elsewhere)

    def _steps(self) -> list[int]:
        return sorted(int(path.name) for path in self._directory.glob("*") if path.name.isdecimal())

    def _rank(self, step: int) -> tuple[float, int]:
        """Key that sorts checkpoints, the best one first."""
        folder = self._directory / str(step)
        _check(folder, [_LOSS])
        loss = json.loads((folder / _LOSS).read_text())["loss"]
        return (math.inf, -step) if loss is None else (loss, step)


class Checkpoints(SavedCheckpoints):
    """The checkpoints of a run in this process, which alone writes to its folder.

    A checkpoint holds the train state and the state of the data iterator, so that a resumed run sees the
    same batches and ends with the same weights, bit for bit. The folder is created if missing. Unfinished and
    superseded checkpoints in it, which a killed process leaves behind, are deleted; a damaged loss is a
    CheckpointError.
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
        with self._explained():
            response = ocp.save_checkpointables_async(path, {"state": state, "data": data_state})
        self._saving = self._thread.submit(self._finish, step, loss, response)

    def wait(self) -> None:
        """Waits until all checkpoints are on disk; raises what ``save`` raises."""
        saving, self._saving = self._saving, None
        with self._explained():
            if saving is not None:
                saving.result()

    def close(self) -> None:
        """Waits as ``wait`` does, and releases the thread that writes checkpoints."""
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
        names = _files(folder)
        with ThreadPoolExecutor() as pool:
            digests = pool.map(_digest, [folder / name for name in names])
            lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
            (folder / _DIGESTS).write_text("".join(lines))
            list(pool.map(flush, [folder, folder / _DIGESTS, *(folder / name for name in names)]))
        self._remove(step)
        folder.rename(self._directory / str(step))
        flush(self._directory)
        with replacing(self._record) as beside:
            beside.write_text(f"{step}\n")
        self._remove_superseded()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Deletes the files of a save that fails, and raises an error for the user instead."""
        try:
            yield
        except Exception as error:  # as in restore
            self._remove_unfinished()
            if isinstance(error, CheckpointError):
                raise
            if "No space left on device" in str(error):  # by whichever library
                raise OSError(errno.ENOSPC, "No space left on device", str(self._directory)) from error
            reason = f"a checkpoint could not be written to {self._directory}: {error}"
            raise CheckpointError(reason) from error

    def _partial(self, step: int) -> Path:
        return self._directory / f"checkpoint.{step}.partial"

    def _remove(self, step: int) -> None:
        """Deletes a checkpoint, if there is one of this step, which at no moment looks like a whole one."""
        folder = self._directory / str(step)
        if folder.exists():
            shutil.rmtree(folder.rename(self._directory / f"removed.{step}.partial"))

    def _remove_superseded(self) -> None:
        """Deletes all checkpoints but the last one and the best one."""
        steps = self._steps()
        if self._writes and len(steps) > 1:
            for old in {*steps} - {steps[-1], min(steps, key=self._rank)}:
                self._remove(old)

    def _remove_unfinished(self) -> None:
        for path in self._directory.glob("*.partial*") if self._writes else ():  # orbax appends to the name
            shutil.rmtree(path, ignore_errors=True)


def _check(folder: Path, names: Sequence[str] | slice) -> None:
    """Compares files, by name or a share of all, with their digests, and the names of all with the list."""
    try:
        lines = (folder / _DIGESTS).read_text().splitlines()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder / _DIGESTS} does not exist: the file was deleted, or the checkpoint is of release "
            "0.2.0 or older, which wrote no digests. Put it back, continue with that release, or start a "
            "new run"
        ) from error
    except (OSError, ValueError) as error:
        raise _damaged(folder / _DIGESTS, f"it cannot be read ({error})") from error
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in sorted({*digests} ^ {*_files(folder)}):
        listed = f"it is missing, but {_DIGESTS} lists it"
        raise _damaged(folder / name, listed if name in digests else f"{_DIGESTS} does not list it")
    names = sorted(digests)[names] if isinstance(names, slice) else names
    with ThreadPoolExecutor() as pool:
        for name, found in zip(names, pool.map(_digest, [folder / name for name in names]), strict=True):
            if found != digests[name]:
                raise _damaged(folder / name, f"its digest is not the one in {_DIGESTS}")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {reason}. Put back the checkpoint {path} is part of, or start a new run"
    )


def _files(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != _DIGESTS)
    return sorted(str(path.relative_to(folder)) for path in files)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error
