"""The files of a collection: episodes, one label per episode, and the learners' states for resuming.

    {collector}/buffer/episode_*.npz
    {collector}/episodes.jsonl      one label per finished episode
    {collector}/collection.json     the settings, and a note that the data are not ExoRL's
    {collector}/resume/{job}_{round:06d}.npz    a learner's state, until the collection is complete

A round is complete once its labels are in ``episodes.jsonl``, which is written last.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_row, read_json, write_json
from agentic_ring.files.npz_files import read_npz
from data_prep.episode_files import LABELS_FILE, SETTINGS_FILE, EpisodeLabel, read_labels, write_episode

LABEL = "exorl-mini (ours)"


@dataclass(frozen=True)
class _Settings:
    """Contents of ``collection.json``; the settings are compared with those of a call."""

    label: Literal["exorl-mini (ours)"]
    about: str
    settings: dict[str, Any]


class CollectionFolder:
    """The files of one collector's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.buffer = path / "buffer"
        self._labels_path = path / LABELS_FILE
        self._resume = path / "resume"

    def begin(self, settings: dict[str, Any]) -> None:
        """Creates the folder, or checks that its episodes were collected with the same settings.

        Raises:
          ConfigError: they were collected with other settings.
          DataError: the settings cannot be read.
        """
        self.buffer.mkdir(parents=True, exist_ok=True)
        path = self.path / SETTINGS_FILE
        about = "made by data_prep.collect, no part of ExoRL"
        contents = {"label": LABEL, "about": about, "settings": settings}
        if path.exists():
            before = read_json(path, _Settings, self._remedy).settings
            different = {key: before.get(key) for key in settings if before.get(key) != settings[key]}
            if different:
                raise ConfigError(
                    f"{self.path} holds episodes collected with {different}, not "
                    f"{ {key: settings[key] for key in different} }; use those settings, another --output, "
                    "or remove the folder"
                )
        elif any(self.buffer.iterdir()):
            raise ConfigError(
                f"{self.buffer} holds episodes that data_prep.collect did not write; use another --output"
            )
        write_json(path, contents)

    def labels(self) -> list[EpisodeLabel]:
        """Returns the labels of all finished episodes, in order.

        Raises:
          DataError: they cannot be read.
        """
        return read_labels(self.path)

    def add_round(
        self, job: str, done: int, episodes: list[Episode], labels: list[dict[str, Any]], state: Any
    ) -> None:
        """Writes the episodes of a job's round ``done``, the state after it, and then the labels."""
        before = self.labels()
        new = []
        for episode, label in zip(episodes, labels, strict=True):
            index = len(before) + len(new)
            path = write_episode(self.buffer, index, episode)
            new.append(EpisodeLabel(file=path.name, index=index, job=job, data=LABEL, **label))
        self._save_state(job, done, state)
        with replacing(self._labels_path) as beside:
            beside.write_text("".join(json_row(asdict(label)) for label in before + new))
        (self._resume / f"{job}_{done - 1:06d}.npz").unlink(missing_ok=True)

    def load_state(self, job: str, done: int, like: Any) -> Any:
        """Returns the state after ``done`` rounds, in the structure of ``like``.

        Raises:
          DataError: it is missing or has another shape.
        """
        path = self._resume / f"{job}_{done:06d}.npz"
        leaves, structure = jax.tree.flatten(like)
        try:
            arrays = read_npz(path, sum(np.asarray(leaf).nbytes for leaf in leaves))
            saved = [_fitting(arrays, str(number), leaf) for number, leaf in enumerate(leaves)]
        except DataError as error:
            raise DataError(f"cannot resume from {path}: {error}; {self._remedy}") from error
        return jax.tree.unflatten(structure, saved)

    def forget_states(self) -> None:
        """Removes the learners' states, which only an unfinished collection needs."""
        shutil.rmtree(self._resume, ignore_errors=True)

    @property
    def _remedy(self) -> str:
        return f"repair it, or remove {self.path} and start again"

    def _save_state(self, job: str, done: int, state: Any) -> None:
        path = self._resume / f"{job}_{done:06d}.npz"
        arrays = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
        with replacing(path) as beside, beside.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def _fitting(arrays: dict[str, np.ndarray], name: str, like: Any) -> np.ndarray:
    """The array of this name; a DataError if its dtype or shape is not that of ``like``."""
    expected = np.asarray(like)
    found = arrays.get(name)
    if found is None or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        described = "missing" if found is None else f"{found.dtype} {found.shape}"
        raise DataError(f"array {name} is {described}, expected {expected.dtype} {expected.shape}")
    return found
