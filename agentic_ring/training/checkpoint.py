"""Checkpoints of a run: saved asynchronously; the last one and the best one are kept."""

from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from agentic_ring.errors import CheckpointError
from agentic_ring.training.train_step import TrainState


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint holds the train state and the state of the data iterator, so that a resumed run sees the
    same batches and ends with the same weights, bit for bit. Orbax writes each one to a temporary
    directory and renames it: an interruption at any moment leaves the previous one intact.

    Args:
      directory: folder of the checkpoints; created if missing.
    """

    def __init__(self, directory: Path):
        policies = ocp.training.preservation_policies
        lowest_loss = policies.BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1)
        keep: Any = policies.AnyPreservationPolicy([policies.LatestN(1), lowest_loss])
        self._directory = directory
        self._checkpointer = ocp.training.Checkpointer(
            str(directory.absolute()), preservation_policy=keep, cleanup_tmp_directories=True
        )

    @property
    def last_step(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint with the lowest loss, or None."""
        losses: dict[int, Any] = {kept.step: kept.metrics for kept in self._checkpointer.checkpoints}
        return min(losses, key=lambda step: losses[step]["loss"], default=None)

    def save(self, step: int, state: TrainState, data_state: dict[str, Any], loss: float) -> None:
        """Starts saving; returns once the state has been copied off the devices."""
        self._checkpointer.save_checkpointables_async(
            step, {"state": state, "data": data_state}, metrics={"loss": loss}, overwrite=True
        )

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Restores the state with the shapes and shardings of ``like``, and the data iterator's state.

        Raises:
          CheckpointError: the checkpoint is damaged or was written by another configuration.
        """
        try:
            loaded = self._checkpointer.load_checkpointables(step, {"state": like, "data": None})
        except Exception as error:  # orbax raises many types for the same error of a user
            raise CheckpointError(
                f"checkpoint {step} in {self._directory} cannot be read with this configuration: {error}. "
                "Use the flags with which it was written, or choose another --output to start a new run"
            ) from error
        return loaded["state"], loaded["data"]

    def close(self) -> None:
        """Waits until all checkpoints are on disk."""
        self._checkpointer.close()
