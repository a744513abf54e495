"""ExoRL's episode files: names, reading and writing without pickles, and selection for a conversion.

    exorl/{domain}/{collector}/buffer/episode_{index:06d}_{length}.npz    as ExoRL publishes them
    ...                               {timestamp}_{index}_{length}.npz    as URLB writes them

Our own data have a row in ``episodes.jsonl`` for each episode, and ``collection.json`` beside it. Episodes of
`mix` without a task reward are in ``mix_reward_free``; those of our own single explorers are in
``mini_{collector}``, so that they are not mistaken for ExoRL's. A damaged or foreign file raises a
``DataError`` that says what is wrong with it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic

from agentic_ring.data.domains import Domain
from agentic_ring.data.trajectories import EPISODE_DTYPES, Episode, episode_widths, make_episode
from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import read_json_rows
from agentic_ring.files.npz_files import read_npz

OWN_COLLECTOR = "mix"
"""The default collector of ``data_prep.collect``."""
REWARD_FREE_SUFFIX = "_reward_free"
SETTINGS_FILE = "collection.json"
LABELS_FILE = "episodes.jsonl"


def collector_folder(root: Path, domain: str, collector: str) -> Path:
    """The folder that holds ``buffer`` and, for our own data, ``collection.json``."""
    return root / "exorl" / domain / collector


URL_BASE = "https://dl.fbaipublicfiles.com/exorl"
COLLECTORS = ("aps", "icm_apt", "diayn", "disagreement", "icm", "proto", "random", "rnd", "smm")
# ExoRL's config.yaml: the capacity of its loader in transitions, and the number of its processes.
_LOADER_TRANSITIONS = 1_000_000
_LOADER_PROCESSES = 4
_NAME = re.compile(r"(?:episode|\d{8}T\d{6})_(\d+)_(\d+)\.npz")


_Count = Annotated[int, pydantic.Field(ge=0)]


@dataclass(frozen=True)
class EpisodeLabel:
    """Origin of one episode.

    Attributes:
      file: name of the file.
      index: place in the order of collection.
      job: name of the job that collected it.
      data: ``LABEL``, which marks episodes that this program collected.
      algorithm: who chose the actions.
      round: round of the job.
      action_repeat: control steps for which each action was held.
      task: full name of the task that was learned, if any.
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
    remedy = f"repair it, or remove {folder} and collect again"
    labels = read_json_rows(path, EpisodeLabel, remedy)
    for number, label in enumerate(labels):
        if label.index != number:
            raise DataError(f"{path}, line {number + 1} has index {label.index}, not {number}; {remedy}")
    return labels


@dataclass(frozen=True)
class EpisodeFile:
    """An episode file and the contents of its name.

    Attributes:
      index: place in the order of collection.
      length: T, the number of transitions.
    """

    path: Path
    index: int
    length: int


def episode_file(path: Path) -> EpisodeFile:
    """Parses the name of an episode file.

    Raises:
      DataError: it has neither ExoRL's nor URLB's form.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise DataError(
            "its name is neither episode_{index:06d}_{length}.npz (ExoRL) "
            "nor {timestamp}_{index}_{length}.npz (URLB)"
        )
    return EpisodeFile(path, int(match[1]), int(match[2]))


def read_episode(file: EpisodeFile, domain: Domain) -> Episode:
    """Reads and checks one episode.

    If ExoRL recorded a reward for each task (``Domain.recorded_rewards``), that of the first is kept; the
    rewards of all tasks are recomputed from the physics.

    Raises:
      DataError: the file is damaged, pickled, or larger than an episode of the domain, or ``make_episode``
        refuses its contents.
    """
    contents = read_npz(file.path, _most_bytes(domain))
    reward = contents.get("reward")
    if reward is not None and reward.ndim == 2 and reward.shape[1] == domain.recorded_rewards:
        contents["reward"] = reward[:, :1]
    episode = make_episode(contents, domain)
    if len(episode) != file.length:
        raise DataError(f"its name says {file.length} transitions, it holds {len(episode)}")
    return episode


def _most_bytes(domain: Domain) -> int:
    """Limit for the bytes of an episode: four times the longest, so that one of a wrong length is read."""
    widths = episode_widths(domain) | {"reward": max(1, domain.recorded_rewards)}
    row = sum(width * EPISODE_DTYPES[name].itemsize for name, width in widths.items())
    return 4 * (domain.episode_steps + 1) * row


def write_episode(buffer: Path, index: int, episode: Episode) -> Path:
    """Writes an episode under ExoRL's name, atomically, and returns its path."""
    path = buffer / f"episode_{index:06d}_{len(episode)}.npz"
    with replacing(path) as beside, beside.open("wb") as file:
        np.savez_compressed(file, **{name: getattr(episode, name) for name in EPISODE_DTYPES})
    return path


@dataclass(frozen=True)
class Source:
    """An episode file, its name in the store, and its label if the collection wrote one."""

    file: EpisodeFile
    name: str
    label: EpisodeLabel | None


def source_folders(root: Path, domain: str, collector: str) -> list[Path]:
    """The collector's folder, and that of the episodes that `mix` explored without reward."""
    folder = collector_folder(root, domain, collector)
    reward_free = folder.with_name(folder.name + REWARD_FREE_SUFFIX)
    return [folder, *([reward_free] if reward_free.exists() else [])]


def find_sources(folders: list[Path]) -> tuple[list[Source], list[tuple[Path, str]]]:
    """The episode files in the order of collection, and (file, reason) of each misnamed file.

    In a folder of ``data_prep.collect``, a file without a label is of an unfinished round and is ignored.

    Raises:
      DataError: the labels of a collection are damaged.
    """
    sources: list[Source] = []
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
            if collected and path.name not in labels:
                continue
            sources.append(Source(file, f"{folder.name}/{path.name}", labels.get(path.name)))
    sources.sort(key=lambda source: (source.file.path.parent, source.file.index, source.name))
    return sources, misnamed


def spread(sources: list[Source], count: int) -> list[Source]:
    """Selects ``count`` files, evenly over the order of collection; all if there are fewer."""
    if count >= len(sources):
        return sources
    middles = (np.arange(count) + 0.5) * len(sources) / count
    return [sources[int(middle)] for middle in middles]


def as_exorl_loads(sources: list[Source]) -> list[Source]:
    """Selects the files that ExoRL's own loader reads (``replay_buffer.py``), which are the earliest.

    Its four processes take files in turn, sorted by name, until each holds more than a quarter of a million
    transitions.
    """
    taken = [0] * _LOADER_PROCESSES
    loaded = []
    for source in sorted(sources, key=lambda source: source.file.path.name):
        process = source.file.index % _LOADER_PROCESSES
        if taken[process] <= _LOADER_TRANSITIONS // _LOADER_PROCESSES:
            taken[process] += source.file.length
            loaded.append(source)
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
