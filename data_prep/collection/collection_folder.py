"""The files of a collection: episodes, one label per episode, and the learners' states for resuming.

    {collector}/buffer/episode_*.npz
    {collector}/episodes.jsonl      one label per finished episode
    {collector}/collection.json     the settings, and a note that the data are not ExoRL's
    {collector}/resume/{job}_{round:06d}.npz    a learner's state, until the collection is complete

A round is complete once its labels are in ``episodes.jsonl``, which is written last.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np

from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files import replacing
from data_prep.episodes.episode_files import write_episode
from data_prep.folders import LABELS_FILE, SETTINGS_FILE

LABEL = "exorl-mini (ours)"


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
            [before] = self._read(path, lambda text: [json.loads(text)["settings"]])
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
        _write_text(path, json.dumps(contents, indent=1) + "\n")

    def labels(self) -> list[dict[str, Any]]:
        """Returns the labels of all finished episodes, in order.

        Raises:
          DataError: they cannot be read.
        """
        if not self._labels_path.exists():
            return []
        return self._read(self._labels_path, lambda text: [json.loads(line) for line in text.splitlines()])

    def add_round(
        self, job: str, done: int, episodes: list[Episode], labels: list[dict[str, Any]], state: Any
    ) -> None:
        """Writes the episodes of a job's round ``done``, the state after it, and then the labels."""
        before = self.labels()
        new = []
        for episode, label in zip(episodes, labels, strict=True):
            index = len(before) + len(new)
            path = write_episode(self.buffer, index, episode)
            new.append({"file": path.name, "index": index, "job": job, "data": LABEL} | label)
        self._save_state(job, done, state)
        _write_text(self._labels_path, "".join(json.dumps(label) + "\n" for label in before + new))
        (self._resume / f"{job}_{done - 1:06d}.npz").unlink(missing_ok=True)

    def load_state(self, job: str, done: int, like: Any) -> Any:
        """Returns the state after ``done`` rounds, in the structure of ``like``.

        Raises:
          DataError: it is missing or has another shape.
        """
        path = self._resume / f"{job}_{done:06d}.npz"
        leaves, structure = jax.tree.flatten(like)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                saved = [arrays[str(number)] for number in range(len(leaves))]
            _check_shapes(saved, leaves)
        except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
            raise DataError(
                f"cannot resume from {path} ({error}); remove {self.path} and start again"
            ) from error
        return jax.tree.unflatten(structure, saved)

    def forget_states(self) -> None:
        """Removes the learners' states, which only an unfinished collection needs."""
        shutil.rmtree(self._resume, ignore_errors=True)

    def _read(self, path: Path, parse: Callable[[str], list[Any]]) -> list[Any]:
        try:
            return parse(path.read_text())
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is damaged ({error!r}); repair it, or remove {self.path} and start again"
            ) from error

    def _save_state(self, job: str, done: int, state: Any) -> None:
        path = self._resume / f"{job}_{done:06d}.npz"
        arrays = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
        with replacing(path) as beside, beside.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def _check_shapes(saved: list[np.ndarray], expected: list[Any]) -> None:
    for number, (found, like) in enumerate(zip(saved, expected, strict=True)):
        if found.shape != np.shape(like):
            raise ValueError(f"array {number} has shape {found.shape}, expected {np.shape(like)}")


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as beside:
        beside.write_text(text)
