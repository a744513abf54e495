"""ExoRL's episode files, and the folders of our own collections.

    exorl/{domain}/{collector}/buffer/episode_{index:06d}_{length}.npz    as ExoRL publishes them
    ...                               {timestamp}_{index}_{length}.npz    as URLB writes them
    .../episodes.jsonl                          one label per finished episode of our own collections
    .../collection.json                         their settings, and a note that the data are not ExoRL's
    .../resume/{job}_{round:06d}.npz            a learner's state, until the collection is complete

Episodes of `mix` without a task reward are in ``mix_reward_free``; those of our own single explorers are in
``mini_{collector}``, so that they are not mistaken for ExoRL's. A damaged or foreign file raises a
``DataError`` that says what is wrong with it.
"""

import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pydantic

from agentic_ring.data.domains import Domain
from agentic_ring.data.trajectories import EPISODE_DTYPES, Episode, episode_widths, make_episode
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_row, read_json, read_json_rows, write_json
from agentic_ring.files.npz_files import read_npz

OWN_COLLECTOR = "mix"
"""The default collector of ``data_prep.collect``."""
REWARD_FREE_SUFFIX = "_reward_free"
SETTINGS_FILE = "collection.json"
LABELS_FILE = "episodes.jsonl"
LABEL = "exorl-mini (ours)"
URL_BASE = "https://dl.fbaipublicfiles.com/exorl"
COLLECTORS = ("aps", "icm_apt", "diayn", "disagreement", "icm", "proto", "random", "rnd", "smm")
# ExoRL's config.yaml: the capacity of its loader in transitions, and the number of its processes.
_LOADER_TRANSITIONS = 1_000_000
_LOADER_PROCESSES = 4
_NAME = re.compile(r"(?:episode|\d{8}T\d{6})_(\d+)_(\d+)\.npz")
_Count = Annotated[int, pydantic.Field(ge=0)]


def collector_folder(root: Path, domain: str, collector: str) -> Path:
    """The folder that holds ``buffer`` and, for our own data, ``collection.json``."""
    return root / "exorl" / domain / collector


@dataclass(frozen=True)
class EpisodeLabel:
    """Origin of one episode.

    Attributes:
      index: place in the order of collection.
      job: name of the job that collected it; ``round`` is the job's.
      data: ``LABEL``, which marks episodes that this program collected.
      algorithm: who chose the actions; ``action_repeat`` is the number of control steps that each was held.
      task: full name of the task that was learned, if any; of `family`, the name of the reward
        (``population.LEARNED``).
      learner_seed, action_noise, skill: of the learner, if any.
    """

    file: str
    index: _Count
    job: str
    data: str
    algorithm: str
    round: _Count
    action_repeat: Annotated[int, pydantic.Field(ge=1)]
    task: str | None = None
    learner_seed: _Count | None = None
    action_noise: float | None = None
    skill: _Count | None = None


def read_labels(folder: Path) -> list[EpisodeLabel]:
    """Returns the labels of a collector's folder in order; none if it has no such file.

    Raises:
      DataError: the file is damaged, or labels are missing or of other files.
    """
    path = folder / LABELS_FILE
    if not path.exists():
        return []
    labels = read_json_rows(path, EpisodeLabel, _remedy(folder))
    for number, label in enumerate(labels):
        if label.index != number:
            raise DataError(
                f"{path}, line {number + 1} has index {label.index}, not {number}; {_remedy(folder)}"
            )
    return labels


def _remedy(folder: Path) -> str:
    return f"repair it, or remove {folder} and collect again"


@dataclass(frozen=True)
class EpisodeFile:
    """An episode file, and the contents of its name: place in the order of collection, and T transitions."""

    path: Path
    index: int
    length: int
    label: EpisodeLabel | None = None
    """Its label, if ``find_episodes`` found one."""

    @property
    def source(self) -> str:
        """Its name in the store."""
        return f"{self.path.parent.parent.name}/{self.path.name}"


def episode_file(path: Path) -> EpisodeFile:
    """Parses the name of an episode file; a ``DataError`` if it has neither ExoRL's nor URLB's form."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise DataError(
            "its name is neither episode_{index:06d}_{length}.npz (ExoRL) "
            "nor {timestamp}_{index}_{length}.npz (URLB)"
        )
    return EpisodeFile(path, int(match[1]), int(match[2]))


def read_episode(file: EpisodeFile, domain: Domain) -> Episode:
    """Reads and checks one episode; of rewards recorded for each task, that of the first is kept.

    Raises:
      DataError: the file is damaged, pickled, or larger than an episode of the domain, or ``make_episode``
        refuses its contents.
    """
    widths = episode_widths(domain) | {"reward": max(1, domain.recorded_rewards)}
    row = sum(width * EPISODE_DTYPES[name].itemsize for name, width in widths.items())
    # Four times the longest, so that an episode of a wrong length is read and refused by its length.
    contents = read_npz(file.path, 4 * (domain.episode_steps + 1) * row)
    reward = contents.get("reward")
    if reward is not None and reward.ndim == 2 and reward.shape[1] == domain.recorded_rewards:
        contents["reward"] = reward[:, :1]
    episode = make_episode(contents, domain)
    if len(episode) != file.length:
        raise DataError(f"its name says {file.length} transitions, it holds {len(episode)}")
    return episode


def write_episode(buffer: Path, index: int, episode: Episode) -> Path:
    """Writes an episode under ExoRL's name, atomically, and returns its path."""
    path = buffer / f"episode_{index:06d}_{len(episode)}.npz"
    with replacing(path) as beside, beside.open("wb") as file:
        np.savez_compressed(file, **{name: getattr(episode, name) for name in EPISODE_DTYPES})
    return path


@dataclass(frozen=True)
class _Settings:
    """Contents of ``collection.json``; the settings are compared with those of a call."""

    label: Literal["exorl-mini (ours)"]
    about: str
    settings: dict[str, Any]


class CollectionFolder:
    """The files of one collector's folder; a round is complete once its labels, the last, are written."""

    def __init__(self, path: Path):
        self.path = path
        self.buffer = path / "buffer"
        self._resume = path / "resume"

    def begin(self, settings: dict[str, Any]) -> None:
        """Creates the folder, or checks that its episodes were collected with the same settings.

        Raises:
          ConfigError: they were not.
          DataError: the settings cannot be read.
        """
        self.buffer.mkdir(parents=True, exist_ok=True)
        path = self.path / SETTINGS_FILE
        before = self._settings()
        if before is not None:
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
        about = "made by data_prep.collect, no part of ExoRL"
        write_json(path, {"label": LABEL, "about": about, "settings": settings})

    def episodes(self) -> int | None:
        """The number of episodes that the collection in the folder was asked for; None if there is none."""
        before = self._settings()
        return None if before is None else before.get("episodes")

    def _settings(self) -> dict[str, Any] | None:
        path = self.path / SETTINGS_FILE
        return read_json(path, _Settings, _remedy(self.path)).settings if path.exists() else None

    def add_round(
        self, job: str, done: int, episodes: list[Episode], labels: list[dict[str, Any]], state: Any
    ) -> None:
        """Writes the episodes of a job's round ``done``, the state after it, and then the labels."""
        written = read_labels(self.path)
        for episode, label in zip(episodes, labels, strict=True):
            path = write_episode(self.buffer, len(written), episode)
            written.append(EpisodeLabel(path.name, len(written), job, LABEL, **label))
        self._save_state(job, done, state)
        with replacing(self.path / LABELS_FILE) as beside:
            beside.write_text("".join(json_row(asdict(label)) for label in written))
        self._state_path(job, done - 1).unlink(missing_ok=True)

    def load_state(self, job: str, done: int, like: Any) -> Any:
        """Returns the state after ``done`` rounds; a ``DataError`` if it is not of the form of ``like``."""
        path = self._state_path(job, done)
        leaves, structure = jax.tree.flatten(like)
        expected = {str(number): np.asarray(leaf) for number, leaf in enumerate(leaves)}
        try:
            found = read_npz(path, sum(array.nbytes for array in expected.values()))
            for name, array in expected.items():
                described = _shape(found[name]) if name in found else "missing"
                if described != _shape(array):
                    raise DataError(f"array {name} is {described}, expected {_shape(array)}")
        except DataError as error:
            raise DataError(f"cannot resume from {path}: {error}; {_remedy(self.path)}") from error
        return jax.tree.unflatten(structure, [found[name] for name in expected])

    def forget_states(self) -> None:
        """Removes the learners' states, which only an unfinished collection needs."""
        shutil.rmtree(self._resume, ignore_errors=True)

    def _state_path(self, job: str, done: int) -> Path:
        return self._resume / f"{job}_{done:06d}.npz"

    def _save_state(self, job: str, done: int, state: Any) -> None:
        arrays = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
        with replacing(self._state_path(job, done)) as beside, beside.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def _shape(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"


def source_folders(root: Path, domain: str, collector: str) -> list[Path]:
    """The collector's folder, and that of the episodes that `mix` explored without reward."""
    folder = collector_folder(root, domain, collector)
    reward_free = folder.with_name(folder.name + REWARD_FREE_SUFFIX)
    return [folder, reward_free] if reward_free.exists() else [folder]


def find_episodes(folders: list[Path]) -> tuple[list[EpisodeFile], list[tuple[Path, str]]]:
    """The episode files in the order of collection, and (file, reason) of each misnamed file.

    In a folder of ``data_prep.collect``, a file without a label is of an unfinished round and is ignored.

    Raises:
      DataError: the labels of a collection are damaged.
    """
    files: list[EpisodeFile] = []
    misnamed: list[tuple[Path, str]] = []
    for folder in folders:
        labels = {label.file: label for label in read_labels(folder)}
        collected = (folder / SETTINGS_FILE).exists()
        for path in sorted(folder.glob("buffer/*.npz")):
            try:
                file = episode_file(path)
            except DataError as error:
                misnamed.append((path, str(error)))
                continue
            if not collected or path.name in labels:
                files.append(replace(file, label=labels.get(path.name)))
    files.sort(key=lambda file: (file.path.parent, file.index, file.path.name))
    return files, misnamed


def spread(files: list[EpisodeFile], count: int) -> list[EpisodeFile]:
    """Selects ``count`` files, evenly over the order of collection; all if there are fewer."""
    if count >= len(files):
        return files
    middles = (np.arange(count) + 0.5) * len(files) / count
    return [files[int(middle)] for middle in middles]


def as_exorl_loads(files: list[EpisodeFile]) -> list[EpisodeFile]:
    """Selects the files that ExoRL's own loader reads (``replay_buffer.py``), which are the earliest.

    Its four processes take files in turn, sorted by name, until each has over a quarter of a million rows.
    """
    taken = [0] * _LOADER_PROCESSES
    loaded = []
    for file in sorted(files, key=lambda file: file.path.name):
        process = file.index % _LOADER_PROCESSES
        if taken[process] <= _LOADER_TRANSITIONS // _LOADER_PROCESSES:
            taken[process] += file.length
            loaded.append(file)
    return loaded


def archive_url(base: str, domain: str, collector: str) -> str:
    """The address of a collector's zip."""
    return f"{base.rstrip('/')}/{domain}/{collector}.zip"


def how_to_get_episodes(root: Path, domain: str, collector: str) -> str:
    """The message for a collector without episode files: how to download or collect them."""
    return (
        f"there are no episode files in {collector_folder(root, domain, collector) / 'buffer'}. To use "
        "ExoRL's, add --download to\n"
        f"  python -m data_prep.exorl --domain {domain} --collector {collector}\n"
        f"or fetch {archive_url(URL_BASE, domain, collector)}\n"
        f"and unpack it so that its buffer/*.npz lie there; collectors: {', '.join(COLLECTORS)} (walker "
        "about 2.6 GB each). To make your own instead:\n"
        f"  python -m data_prep.collect --domain {domain}"
    )
