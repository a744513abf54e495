"""Which episode files of a collector are converted, in the order they were collected."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentic_ring.errors import DataError
from data_prep.collection.ledger import LABELS_FILE, SETTINGS_FILE
from data_prep.episodes.episode_files import EpisodeFile, episode_file
from data_prep.folders import REWARD_FREE_SUFFIX, collector_folder

# ExoRL's config.yaml: the loader's size in transitions, and the processes that share it out.
_LOADER_TRANSITIONS = 1_000_000
_LOADER_PROCESSES = 4


@dataclass(frozen=True)
class Source:
    """A file, its name in the store, and its label if the collection wrote one."""

    file: EpisodeFile
    name: str
    label: dict[str, Any] | None


def source_folders(root: Path, domain: str, collector: str) -> list[Path]:
    """The collector's folder, and beside it what `mix` explored without reward."""
    folder = collector_folder(root, domain, collector)
    reward_free = folder.with_name(folder.name + REWARD_FREE_SUFFIX)
    return [folder, *([reward_free] if reward_free.exists() else [])]


def find_sources(folders: list[Path]) -> tuple[list[Source], list[tuple[Path, str]]]:
    """The episode files in the order of collection, and (file, reason) of each that is misnamed.

    In a folder of ``data_prep.collect`` a file without a label is of a round that has not ended: it is
    left for later.

    Raises:
      DataError: a collection's labels are damaged.
    """
    sources: list[Source] = []
    misnamed: list[tuple[Path, str]] = []
    for folder in folders:
        labels, collected = _read_labels(folder), (folder / SETTINGS_FILE).exists()
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
    """``count`` of them, evenly over the whole exploration; all if there are no more."""
    if count >= len(sources):
        return sources
    middles = (np.arange(count) + 0.5) * len(sources) / count
    return [sources[int(middle)] for middle in middles]


def as_exorl_loads(sources: list[Source]) -> list[Source]:
    """Those that ExoRL's own loader gets to (``replay_buffer.py``): the first, and earliest explored.

    Its four processes take the files of their turn by name, until they hold more than a quarter of a
    million transitions each.
    """
    taken = [0] * _LOADER_PROCESSES
    loaded = []
    for source in sorted(sources, key=lambda source: source.file.path.name):
        process = source.file.index % _LOADER_PROCESSES
        if taken[process] <= _LOADER_TRANSITIONS // _LOADER_PROCESSES:
            taken[process] += source.file.length
            loaded.append(source)
    return loaded


def _read_labels(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / LABELS_FILE
    if not path.exists():
        return {}
    try:
        labels = [json.loads(line) for line in path.read_text().splitlines()]
        used = ("algorithm", "action_repeat")
        return {label["file"]: {key: label[key] for key in used} for label in labels}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); mend it, or collect again") from None
