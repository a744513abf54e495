"""ExoRL's episode files: their names, and reading and writing them without pickles.

    exorl/{domain}/{collector}/buffer/episode_{index:06d}_{length}.npz    as ExoRL publishes them
    ...                               {timestamp}_{index}_{length}.npz    as URLB writes them

A damaged or foreign file gives a ``DataError`` that says what is wrong with it.
"""

import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentic_ring.data.tasks import Domain
from agentic_ring.data.trajectories import EPISODE_DTYPES, Episode, make_episode
from agentic_ring.errors import DataError
from agentic_ring.files import replacing

_NAME = re.compile(r"(?:episode|\d{8}T\d{6})_(\d+)_(\d+)\.npz")


@dataclass(frozen=True)
class EpisodeFile:
    """A file and what its name says.

    Attributes:
      index: place in the order of collection.
      length: T, the number of transitions.
    """

    path: Path
    index: int
    length: int


def episode_file(path: Path) -> EpisodeFile:
    """Reads the name of an episode file.

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

    Where ExoRL recorded a reward for each task (``Domain.recorded_rewards``), that of the first is
    kept; all are computed anew from the physics.

    Raises:
      DataError: the file cannot be read without pickles, or ``make_episode`` refuses its contents.
    """
    try:
        # NumPy leaves a file that it opened itself open when the archive is damaged.
        with file.path.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise DataError("it holds a bare array, expected an .npz archive")
            contents = {name: loaded[name] for name in loaded.files}
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(f"it is no readable .npz without pickles ({error})") from error
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
